//! The addresses of a new pod, from the source that the network configuration names.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;
use serde_json::Value;
use tokio::sync::OwnedMutexGuard;
use tortie_api::kubernetes::Pod;
use tortie_api::{Key, Kind, Metadata, Position, Resource};
use tortie_cni::{Address, AddressSource, Code, Failure, Invocation, Success};
use tortie_dataplane::{EndpointId, HostPort, PodAddress, PreparedLink};
use tortie_flannel::LeaseSnapshot;
use tortie_ipam::{Family, IpamError, Request, Use};
use tortie_store::Stored;

use crate::addresses::{self, Assign, OfFamily, Wanted, handle};
use crate::pods::{Pods, blocking, store_failure, wiring_failure};
use crate::publication::{Link, Publication};
use crate::runtime_config;

/// How many addresses of the operating system may belong to somebody else.
const MOST_REFUSED: usize = 16;

/// The addresses for a pod.
pub(crate) struct Obtained {
    /// At least one, at most one of each family, IPv4 first.
    pub(crate) addresses: Vec<PodAddress>,
    /// Whether the agent's IPAM does not know them.
    pub(crate) outside: bool,
    /// The position of the pod's endpoint, if it was published with the allocation.
    pub(crate) published: Option<Position>,
    /// What the allocation has made of the prepared link.
    pub(crate) link: Link,
    /// Keeps other calls from using the same addresses until this one is done.
    _turns: Vec<OwnedMutexGuard<()>>,
}

impl Pods {
    /// The addresses of a pod that Tortie can connect as it is wanted.
    pub(crate) async fn check_and_obtain(
        &self,
        call: &Invocation,
        id: &EndpointId,
        pod: &(Stored, Pod),
        namespace: Metadata,
        prepared: Option<PreparedLink>,
    ) -> Result<Obtained, Failure> {
        runtime_config::check(call, &pod.1, self.wiring.takes_mac())?;
        let limits = self.limits(call, pod)?;
        // The link exists before the endpoint is published, because the node reports endpoints without a link.
        let publication = prepared.map(|link| self.publication(call, id, pod, limits, link)).transpose()?;
        // Reading took a while.
        self.refuse_blocked(id)?;
        self.refuse_taken_host_port(id, &pod.1).await?;
        self.obtain(call, id, pod, namespace, publication).await
    }

    /// Whoever has a port of the node keeps it (policy decision 52). Pods that name their node avoid the scheduler, which would see the
    /// conflict.
    async fn refuse_taken_host_port(&self, id: &EndpointId, pod: &Pod) -> Result<(), Failure> {
        let wanted: Vec<HostPort> = pod.lasting_host_ports().iter().filter_map(HostPort::of).collect();
        let is_other = |other: &EndpointId| (&other.namespace, &other.pod) != (&id.namespace, &id.pod);
        let conflict = |port: &HostPort| wanted.iter().find(|wanted| wanted.conflicts(port));
        let holders: BTreeSet<EndpointId> = {
            let now = self.in_force.borrow();
            let holds =
                |(port, holder): &&(HostPort, EndpointId)| is_other(holder) && conflict(port).is_some();
            now.host_ports.iter().filter(holds).map(|(_, holder)| holder.clone()).collect()
        };
        for holder in holders {
            let ports = self.ports_of_running_pod(&holder).await?;
            if let Some(port) = ports.iter().find_map(conflict) {
                let msg =
                    format!("hostPort {port} of pod {}/{} is that of pod {holder}", id.namespace, id.pod);
                let remedy = "it is free when that pod has ended; or choose another hostPort";
                return Err(Failure::new(Code::TRY_AGAIN_LATER, msg, remedy));
            }
        }
        Ok(())
    }

    /// The ports of the node of a pod that has not ended. An endpoint may outlive its pod, for instance if the runtime has forgotten it.
    async fn ports_of_running_pod(&self, id: &EndpointId) -> Result<Vec<HostPort>, Failure> {
        let key = Key::namespaced(Kind::Pod, &*id.namespace, &*id.pod);
        let Some(stored) = self.store.get(&key).await.map_err(store_failure)? else { return Ok(Vec::new()) };
        Ok(match Resource::read(&key, &stored.value) {
            Ok(Resource::Pod(pod)) if !pod.has_ended() && pod.spec.node_name.as_ref() == Some(&self.node) => {
                pod.lasting_host_ports().iter().filter_map(HostPort::of).collect()
            }
            _ => Vec::new(),
        })
    }

    /// The addresses of a new pod. With a `publication`, its endpoint may be published with the allocation of the last one.
    async fn obtain(
        &self,
        call: &Invocation,
        id: &EndpointId,
        pod: &(Stored, Pod),
        namespace: Metadata,
        publication: Option<Publication>,
    ) -> Result<Obtained, Failure> {
        let source = call.config.address_source()?;
        let namespace_key = Key::global(Kind::Namespace, &*id.namespace);
        let wanted = addresses::wanted(
            call,
            source,
            (&pod.0.key, &pod.1.metadata.annotations),
            (&namespace_key, &namespace.annotations),
        )?;
        if let Some(address) = wanted.outside {
            let from = format!("the address {address} of the annotation cni.projectcalico.org/ipAddrsNoIpam");
            return self.outside(id, &[(from, IpAddr::V4(address).into())]).await;
        }
        let request = Request {
            handle: handle(call),
            owner: self.owner(id),
            intended_use: Use::Workload,
            namespace_labels: namespace.labels,
            ..Request::default()
        };
        match source {
            AddressSource::Pools => self.of_pools(call, id, &request, wanted, publication).await,
            AddressSource::System => self.chosen_by_system(call, id, &request).await,
            AddressSource::HostLocal | AddressSource::Plugin(_) if call.delegated.is_empty() => {
                let msg = format!("the plugin has passed no address of ipam.type {}", source.name());
                Err(Failure::new(Code::INVALID_CONFIG, msg, "install tortie-cni of the agent's version"))
            }
            AddressSource::HostLocal | AddressSource::Plugin(_) => {
                let from = |net: &IpNet| format!("the address {} of ipam.type {}", net.addr(), source.name());
                let nets: Vec<_> = call.delegated.iter().map(|net| (from(net), *net)).collect();
                if let (AddressSource::HostLocal, Some(leases)) = (source, &self.leases) {
                    refuse_other_subnet(&leases.borrow(), &nets)?;
                }
                self.outside(id, &nets).await
            }
        }
    }

    /// Addresses of Tortie's own IPAM.
    async fn of_pools(
        &self,
        call: &Invocation,
        id: &EndpointId,
        request: &Request,
        wanted: Wanted,
        publication: Option<Publication>,
    ) -> Result<Obtained, Failure> {
        // A network with one block may have no room for a pod that can do without IPv6.
        let is_ipv6_optional = wanted.ipv6.assign == Assign::IfPool && self.ipam.has_one_block();
        let due = self.due(id, request, wanted).await?;
        let (mut addresses, mut published, mut link) = (Vec::new(), None, Link::Unchanged);
        for (request, wanted) in &due {
            let one = match (wanted, &publication) {
                // The endpoint has all addresses of the pod, and the handle of a second one exists, so it is not shared.
                (None, Some(publication)) if due.len() == 1 => {
                    let one = self.assign_only_address(request, publication).await?;
                    (published, link) = (one.published, one.link);
                    one.address
                }
                (None, _) if is_ipv6_optional && request.family == Family::V6 => {
                    match addresses::assign_if_room(&self.ipam, request).await? {
                        Some(one) => addresses::of_assignment(&one),
                        None => continue,
                    }
                }
                _ => {
                    let one = addresses::assign(&self.ipam, call, request, *wanted).await?;
                    addresses::of_assignment(&one)
                }
            };
            addresses.push(one);
        }
        Ok(Obtained { addresses, outside: false, published, link, _turns: Vec::new() })
    }

    /// The requests for addresses of Tortie's own IPAM, each with the address that is wanted, if any.
    async fn due(
        &self,
        id: &EndpointId,
        request: &Request,
        Wanted { addresses, outside: _, ipv4, ipv6 }: Wanted,
    ) -> Result<Vec<(Request, Option<IpAddr>)>, Failure> {
        let is_ipv6_needed = ipv6.assign == Assign::Always || addresses.iter().any(IpAddr::is_ipv6);
        if is_ipv6_needed && !self.has_ipv6()? {
            let msg =
                format!("{id} requests an IPv6 address, and pods of this node have IPv4 addresses only");
            return Err(Failure::new(Code::NOT_SUPPORTED, msg, "take the request out, or use a Linux node"));
        }
        let mut due = Vec::new();
        for (family, OfFamily { assign, pools }) in [(Family::V4, ipv4), (Family::V6, ipv6)] {
            let request = Request { family, pools, ..request.clone() };
            let wanted = addresses.iter().find(|address| Family::of(&IpNet::from(**address)) == family);
            // Whoever requests addresses gets these and no others.
            let is_due = match (addresses.is_empty(), assign) {
                (false, _) => wanted.is_some(),
                (true, Assign::Always) => true,
                (true, Assign::Never) => false,
                // Most clusters have none, and this is known without a request.
                (true, Assign::IfPool) if family == Family::V6 && self.ipam.lacks_ipv6_pools() => false,
                // Pools that nodes without IPv6 cannot use are no problem there.
                (true, Assign::IfPool) if family == Family::V6 && !self.has_ipv6()? => false,
                (true, Assign::IfPool) => {
                    let has_pool = self.ipam.has_pool(&request).await;
                    has_pool.map_err(|error| addresses::no_address(&error))?
                }
            };
            if is_due {
                due.push((request, wanted.copied()));
            }
        }
        Ok(due)
    }

    fn has_ipv6(&self) -> Result<bool, Failure> {
        self.wiring.has_ipv6().map_err(wiring_failure)
    }

    /// Addresses that the agent's IPAM does not know, each with where it is from. Nobody else may have them, wherever they are from.
    async fn outside(&self, id: &EndpointId, nets: &[(String, IpNet)]) -> Result<Obtained, Failure> {
        let (mut addresses, mut turns) = (Vec::new(), Vec::new());
        // Two calls wait for each other only if they lock in different orders; IPv4 comes first.
        for (from, net) in nets {
            turns.push(self.addressing.lock(&net.addr()).await);
            self.refuse_outside(id, from, net).await?;
            addresses.push(PodAddress { address: net.addr(), block: net.trunc() });
        }
        Ok(Obtained { addresses, outside: true, published: None, link: Link::Unchanged, _turns: turns })
    }

    /// Refuses an address that the pod cannot have.
    async fn refuse_outside(&self, id: &EndpointId, from: &str, net: &IpNet) -> Result<(), Failure> {
        let address = net.addr();
        if address.is_ipv6() && !self.has_ipv6()? {
            let msg = format!("{from} is for {id}, and pods of this node have IPv4 addresses only");
            let remedy = "take the IPv6 ranges out of ipam, or use a Linux node";
            return Err(Failure::new(Code::NOT_SUPPORTED, msg, remedy));
        }
        let holder = self.in_force.borrow().holders.get(&address).cloned();
        if let Some(holder) = holder.filter(|holder| holder != id) {
            let msg = format!("{from} belongs to pod {holder}");
            return Err(Failure::new(Code::TRY_AGAIN_LATER, msg, "it is free when that pod is deleted"));
        }
        let pool = self
            .ipam
            .giving_pool(address)
            .await
            .map_err(|error| Failure::new(Code::IPAM, "the IPPools cannot be read", error.to_string()))?;
        if let Some(pool) = pool {
            let msg = format!("{from} is in IPPool {pool}, from which Tortie gives addresses, too");
            let remedy = "use another network, or set assignmentMode Manual or disabled in the IPPool";
            return Err(Failure::new(Code::IPAM, msg, remedy));
        }
        Ok(())
    }

    /// An address that the operating system chooses. IPAM records it, so that it gives it to nobody else.
    async fn chosen_by_system(
        &self,
        call: &Invocation,
        id: &EndpointId,
        request: &Request,
    ) -> Result<Obtained, Failure> {
        let mut refused: Vec<Ipv4Addr> = Vec::new();
        loop {
            let (wiring, container) = (self.wiring.clone(), call.container_id.clone());
            let (endpoint, not_these) = (id.clone(), refused.clone());
            let chosen = blocking(move || wiring.choose_address(&endpoint, &container, &not_these)).await;
            let Some(address) = chosen.map_err(wiring_failure)? else {
                let msg = format!("ipam of network {} is empty", call.config.name);
                let why = "this operating system chooses no addresses; set ipam.type to calico-ipam";
                return Err(Failure::new(Code::NOT_SUPPORTED, msg, why));
            };
            match self.ipam.assign_address(request, address.into()).await {
                // Windows itself needs it, or IPAM has given it to something that HNS does not know.
                Err(IpamError::Taken { .. }) if refused.len() < MOST_REFUSED => refused.push(address),
                assigned => {
                    let assigned = assigned.map_err(|error| {
                        let msg = format!("the address {address}, which the operating system has chosen");
                        Failure::new(Code::IPAM, msg, error.to_string())
                    })?;
                    let own = addresses::of_assignment(&assigned);
                    return Ok(Obtained {
                        addresses: vec![own],
                        outside: false,
                        published: None,
                        link: Link::Unchanged,
                        _turns: Vec::new(),
                    });
                }
            }
        }
    }

    /// The networks of the node's pods (`Node.spec.podCIDRs`, or flannel's lease in etcd), for host-local.
    pub(crate) async fn pod_cidrs(&self) -> Result<Success, Failure> {
        let of_nets = |nets: &[IpNet]| {
            let ips = nets.iter().map(|net| Address { address: net.to_string(), interface: 0 }).collect();
            Success { ips, ..Success::default() }
        };
        if let Some(leases) = &self.leases {
            let leases = leases.borrow();
            let own: Vec<IpNet> = leases.own.iter().map(|lease| lease.subnet).collect();
            return match &leases.lost {
                Some(lost) => {
                    let msg = "the node has no subnet of flannel that it may use";
                    Err(Failure::new(Code::TRY_AGAIN_LATER, msg, lost.clone()))
                }
                None => Ok(of_nets(&own)),
            };
        }
        let key = Key::global(Kind::Node, &self.node);
        let node = self.store.get(&key).await.map_err(store_failure)?;
        let spec = node.as_ref().map_or(&Value::Null, |node| &node.value["spec"]);
        let several = spec["podCIDRs"].as_array().filter(|nets| !nets.is_empty());
        let nets = several.map_or_else(|| vec![&spec["podCIDR"]], |nets| nets.iter().collect());
        let nets: Vec<IpNet> = nets.iter().filter_map(|net| net.as_str()?.parse().ok()).collect();
        if nets.is_empty() {
            let msg = format!("{key} has no network in spec.podCIDRs, which host-local needs");
            let remedy =
                "let the controller manager allocate them (--allocate-node-cidrs), or write ipam.subnet";
            return Err(Failure::new(Code::TRY_AGAIN_LATER, msg, remedy));
        }
        Ok(of_nets(&nets))
    }
}

/// Refuses what is no address of the node's subnets of flannel: no other node has a route to it. The plugin may have asked before the
/// agent was started again with another subnet.
fn refuse_other_subnet(leases: &LeaseSnapshot, nets: &[(String, IpNet)]) -> Result<(), Failure> {
    let is_own = |net: &IpNet| leases.own.iter().any(|lease| lease.subnet.contains(&net.addr()));
    let Some((from, _)) = nets.iter().find(|(_, net)| !is_own(net)) else { return Ok(()) };
    let own: Vec<String> = leases.own.iter().map(|lease| lease.subnet.to_string()).collect();
    let msg = format!("{from} is not in the node's subnet of flannel, {}", own.join(", "));
    let remedy = "the next attempt uses the subnet, unless ipam in the CNI configuration has another one";
    Err(Failure::new(Code::TRY_AGAIN_LATER, msg, remedy))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tortie_api::kubernetes::{FlannelBackend, FlannelLease};

    use super::*;

    #[test]
    fn addresses_are_of_the_subnet_that_the_node_has_now() {
        let lease = |subnet: &str| FlannelLease {
            subnet: subnet.parse().unwrap(),
            public_ip: "192.0.2.1".parse().unwrap(),
            backend: FlannelBackend::HostGw,
        };
        let own = vec![lease("10.5.2.0/24"), lease("fd00:0:0:2::/64")];
        let leases = LeaseSnapshot { own, ..LeaseSnapshot::default() };
        for (nets, expected) in [
            (&["10.5.2.7/24"][..], None),
            (&["10.5.2.7/24", "fd00:0:0:2::7/64"], None),
            (
                &["10.5.3.7/24"],
                Some("10.5.3.7/24 is not in the node's subnet of flannel, 10.5.2.0/24, fd00:0:0:2::/64"),
            ),
            (&["10.5.2.7/24", "fd00:0:0:3::7/64"], Some("fd00:0:0:3::7/64 is not in")),
        ] {
            let nets: Vec<(String, IpNet)> =
                nets.iter().map(|net| ((*net).to_owned(), net.parse().unwrap())).collect();
            let refused = refuse_other_subnet(&leases, &nets).err().map(|failure| format!("{failure:?}"));
            let is_so = match expected {
                None => refused.is_none(),
                Some(expected) => refused.as_ref().is_some_and(|refused| refused.contains(expected)),
            };
            assert!(is_so, "{refused:?}");
        }
    }
}
