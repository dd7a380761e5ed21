//! Recognises the HNS endpoints of pods that another CNI plugin has connected.
//!
//! An endpoint is a pod's if it has all addresses of the pod, and if the result of the plugin, which the container runtime keeps, says
//! whose it is: it names the endpoint, or the sandbox for which the endpoint is named. The address alone is no proof. The
//! addresses of a pod in the Kubernetes API lag behind: the next pod may have the address already.

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::PathBuf;

use tortie_cni::results::{self, KeptResult};
use tortie_dataplane::{Condition, EndpointId, NodeState, Reason};
use tortie_hcn::schema::{Endpoint, NamespaceType, Query};
use tortie_hcn::{Guid, Hcn, HcnExt, Kind};
use tracing::{info, warn};

use crate::Error;
use crate::endpoint::close;
use crate::unrecognised::Unrecognised;

/// How the endpoints of pods are recognised that another CNI plugin has connected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicyOnly {
    /// The folder where the container runtime keeps the results of CNI plugins (`results` in libcni's cache).
    pub results: PathBuf,
}

/// What HNS and the container runtime have, as far as it tells whose an endpoint is.
#[derive(Debug)]
struct Observed {
    /// The endpoints of this machine. Those of backends elsewhere, and those of the node itself, are left out.
    endpoints: Vec<Endpoint>,
    results: Vec<KeptResult>,
}

impl Observed {
    fn read(hcn: &(impl Hcn + ?Sized), config: &PolicyOnly) -> Result<Observed, Error> {
        // A result names an endpoint that exists, so the results come first.
        let results = results::read(&config.results).map_err(|error| Error::CniResults {
            folder: config.results.display().to_string(),
            problem: error.to_string(),
        })?;
        let of_node = namespaces_of_node(hcn)?;
        let mut endpoints = Vec::new();
        for id in hcn.enumerate(Kind::Endpoint, &Query::all())? {
            match hcn.endpoint(id) {
                Ok(endpoint)
                    if endpoint.is_remote() || of_node.contains(&endpoint.host_compute_namespace) => {}
                Ok(endpoint) => endpoints.push(endpoint),
                Err(error) if error.is_not_found() => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Observed { endpoints, results })
    }

    /// The endpoint of a pod with these addresses.
    fn endpoint_of(&self, id: &EndpointId, addresses: &[IpAddr]) -> Result<&Endpoint, Unrecognised> {
        let mut with_addresses = Vec::new();
        for address in addresses {
            let found: Vec<&Endpoint> = self.endpoints.iter().filter(|it| has(it, *address)).collect();
            if found.is_empty() {
                return Err(Unrecognised::NoEndpoint(*address));
            }
            with_addresses.push((*address, found));
        }
        let Some((address, first)) = with_addresses.first() else {
            return Err(Unrecognised::NoEndpoint(IpAddr::from([0; 4])));
        };
        let has_all = |it: &&&Endpoint| addresses.iter().all(|address| has(it, *address));
        let own: Vec<&Endpoint> = first
            .iter()
            .filter(has_all)
            .filter(|it| self.owners(it).any(|result| is_proof(result, id, addresses)))
            .copied()
            .collect();
        match own.as_slice() {
            [only] => Ok(only),
            [] => Err(self.unproven(first, *address)),
            several => Err(Unrecognised::Several(names(several))),
        }
    }

    fn unproven(&self, endpoints: &[&Endpoint], address: IpAddr) -> Unrecognised {
        let other = endpoints.iter().find_map(|it| Some((it, self.owners(it).next()?)));
        match other {
            Some((endpoint, owner)) => Unrecognised::OfAnother {
                endpoint: endpoint.name.clone(),
                address,
                owner: format!("{}/{}", owner.namespace, owner.pod),
            },
            None => Unrecognised::Unproven {
                endpoints: names(endpoints),
                address,
                are_closed: endpoints.iter().all(|it| !it.host_compute_namespace.is_zero()),
            },
        }
    }

    /// The results that are about this endpoint.
    fn owners(&self, endpoint: &Endpoint) -> impl Iterator<Item = &KeptResult> {
        self.results.iter().filter(move |result| is_about(result, endpoint))
    }

    /// The endpoints that are pods', and that nobody of these has: they must be closed.
    fn unclaimed<'a>(
        &'a self,
        state: &'a NodeState,
        claimed: &'a BTreeSet<Guid>,
    ) -> impl Iterator<Item = &'a Endpoint> {
        let of_pods: BTreeSet<IpAddr> =
            state.endpoints.values().flat_map(|pod| pod.addresses.iter().copied()).collect();
        // An endpoint without a namespace may be the node's own, such as that of flannel's bridge.
        let has_address = move |it: &Endpoint| {
            !it.host_compute_namespace.is_zero() && of_pods.iter().any(|address| has(it, *address))
        };
        let is_pods = move |it: &&Endpoint| has_address(it) || self.owners(it).next().is_some();
        self.endpoints.iter().filter(is_pods).filter(|it| !claimed.contains(&it.id))
    }
}

/// Finds the endpoints of pods during one reconciliation. HNS and results are read once, when the first endpoint is looked for.
pub(crate) struct Recognition<'a> {
    hcn: &'a dyn Hcn,
    config: &'a PolicyOnly,
    observed: OnceCell<Result<Observed, Error>>,
}

/// What came of closing the endpoints of unknown pods.
#[derive(Debug, Default)]
pub(crate) struct Closing {
    /// The endpoints that could not be closed.
    pub(crate) failures: Vec<Error>,
    /// Further endpoints of recognised pods, which stay closed.
    pub(crate) further: Vec<Condition>,
}

impl<'a> Recognition<'a> {
    pub(crate) fn new(hcn: &'a dyn Hcn, config: &'a PolicyOnly) -> Recognition<'a> {
        Recognition { hcn, config, observed: OnceCell::new() }
    }

    fn observed(&self) -> Result<&Observed, Error> {
        self.observed.get_or_init(|| Observed::read(self.hcn, self.config)).as_ref().map_err(Clone::clone)
    }

    /// Whether HNS and results have been read.
    pub(crate) fn has_looked(&self) -> bool {
        self.observed.get().is_some()
    }

    /// The endpoint of a pod, as HNS has it now.
    pub(crate) fn find(&self, id: &EndpointId, addresses: &[IpAddr]) -> Result<Endpoint, Error> {
        let known = self.observed()?.endpoint_of(id, addresses).map_err(Error::Unrecognised)?;
        match self.hcn.endpoint(known.id) {
            Ok(endpoint) if addresses.iter().all(|address| has(&endpoint, *address)) => Ok(endpoint),
            Ok(_) => Err(gone(addresses)),
            Err(error) if error.is_not_found() => Err(gone(addresses)),
            Err(error) => Err(error.into()),
        }
    }

    /// Closes the endpoints of pods that are not known, or whose endpoint another pod claims.
    pub(crate) fn close_unclaimed(&self, state: &NodeState) -> Result<Closing, Error> {
        let observed = self.observed()?;
        let pods = state.endpoints.iter();
        let own = pods.filter_map(|(id, pod)| Some((id, observed.endpoint_of(id, &pod.addresses).ok()?.id)));
        let own: BTreeMap<&EndpointId, Guid> = own.collect();
        let claimed: BTreeSet<Guid> = own.values().copied().collect();
        let mut closing = Closing::default();
        for endpoint in observed.unclaimed(state, &claimed) {
            let is_known =
                |it: &KeptResult| own.keys().any(|id| *it.namespace == *id.namespace && *it.pod == *id.pod);
            let owner = observed.owners(endpoint).find(|it| is_known(it));
            closing.further.extend(owner.map(|owner| further_closed(endpoint, owner)));
            match close(self.hcn, endpoint) {
                Ok(true) => {
                    info!(endpoint = endpoint.name, "closed: it is a pod's, and it is not known whose")
                }
                Ok(false) => {}
                Err(error) if error.is_unavailable() => return Err(error),
                Err(Error::Hns(error)) if error.is_not_found() => {}
                Err(error) => {
                    warn!(endpoint = endpoint.name, %error, "cannot close the endpoint of an unknown pod; Tortie retries");
                    closing.failures.push(error);
                }
            }
        }
        Ok(closing)
    }
}

/// The condition about an endpoint of a pod that has another one with its address.
fn further_closed(endpoint: &Endpoint, owner: &KeptResult) -> Condition {
    let KeptResult { namespace, pod, .. } = owner;
    let message = format!(
        "HNS endpoint {} of pod {namespace}/{pod} is closed, because Tortie enforces policy only on the endpoint with the pod's address",
        endpoint.name
    );
    Condition::new(Reason::InterfaceClosed, message)
}

fn namespaces_of_node(hcn: &(impl Hcn + ?Sized)) -> Result<BTreeSet<Guid>, Error> {
    let mut of_node = BTreeSet::new();
    for id in hcn.enumerate(Kind::Namespace, &Query::all())? {
        match hcn.namespace(id) {
            Ok(namespace) if namespace.r#type == NamespaceType::HostDefault => drop(of_node.insert(id)),
            Ok(_) => {}
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(of_node)
}

fn gone(addresses: &[IpAddr]) -> Error {
    let address = addresses.first().copied().unwrap_or(IpAddr::from([0; 4]));
    Error::Unrecognised(Unrecognised::NoEndpoint(address))
}

fn has(endpoint: &Endpoint, address: IpAddr) -> bool {
    let parsed = |text: &str| text.parse::<IpAddr>();
    endpoint.ip_configurations.iter().any(|config| parsed(&config.ip_address) == Ok(address))
}

fn is_proof(result: &KeptResult, id: &EndpointId, addresses: &[IpAddr]) -> bool {
    result.is_of(&id.namespace, &id.pod, &id.interface)
        && addresses.iter().all(|address| result.addresses.contains(address))
}

/// Whether a result is about this endpoint: by its name (win-overlay and win-bridge list it as an interface, and name it for
/// the sandbox, as Azure's and AWS' plugins do), or by the namespace in which it is.
fn is_about(result: &KeptResult, endpoint: &Endpoint) -> bool {
    let KeptResult { container_id, interface, host_interfaces, sandboxes, .. } = result;
    let name = endpoint.name.to_ascii_lowercase();
    let container = container_id.to_ascii_lowercase();
    let is_listed = host_interfaces.iter().any(|listed| listed.eq_ignore_ascii_case(&name));
    let is_named_for = !container.is_empty()
        && (name.strip_prefix(&container).is_some_and(|rest| rest.starts_with('_'))
            || name == format!("cid-{container}")
            || container
                .get(..8)
                .is_some_and(|short| name == format!("{short}-{}", interface.to_ascii_lowercase())));
    let namespace = endpoint.host_compute_namespace;
    let is_in_sandbox = !namespace.is_zero() && sandboxes.iter().any(|text| text.parse() == Ok(namespace));
    (!name.is_empty() && is_listed) || is_named_for || is_in_sandbox
}

fn names(endpoints: &[&Endpoint]) -> Vec<String> {
    endpoints.iter().map(|endpoint| endpoint.name.clone()).collect()
}

#[cfg(test)]
#[path = "recognition/tests.rs"]
mod tests;
