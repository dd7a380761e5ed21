//! Services: their addresses, and what replaces kube-proxy on Windows nodes, where `sessionAffinity` and the traffic policies have no
//! effect: every connection may go to every ready backend. The agents of Linux nodes serve Services themselves.

pub(crate) mod addresses;
pub(crate) mod dns;
mod windows;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use tokio::task::JoinHandle;
use tortie_api::kubernetes::{EndpointSlice, Service};
use tortie_api::net::Protocol;
use tortie_api::{Kind, Resource};
use tortie_hcn::RemoteHcn;
use tortie_store::{Cache, Interest, Store, Stored};

use self::windows::Balancers;
use crate::LabError;

/// An address and a port of backends.
pub(crate) type Backend = (Ipv4Addr, u16);

/// An address, a protocol and a port that lead to backends. Without an address, every address of the node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Front {
    pub(crate) address: Option<Ipv4Addr>,
    pub(crate) protocol: Protocol,
    pub(crate) port: u16,
}

/// The state of all Services on a node.
pub(crate) type Fronts = BTreeMap<Front, BTreeSet<Backend>>;

/// Keeps the Services of Windows nodes current. The status of pods says behind which node a backend of HNS is.
pub(crate) async fn start(
    store: Arc<dyn Store>,
    nodes: Vec<(String, Arc<RemoteHcn>)>,
) -> Result<JoinHandle<()>, LabError> {
    let kinds = [Kind::Service, Kind::EndpointSlice, Kind::Pod];
    let mut cache = Cache::new(&*store, kinds.map(Interest::all).to_vec());
    cache.complete().await?;
    let mut proxies: Vec<Proxy> =
        nodes.into_iter().map(|(name, hcn)| Proxy { name, balancers: Balancers::new(hcn) }).collect();
    Ok(tokio::spawn(async move {
        loop {
            let objects: Vec<&Stored> = cache.objects().collect();
            let (fronts, hosts) = (Arc::new(fronts(&objects)), Arc::new(hosts(&objects)));
            let mut is_done = true;
            for proxy in &mut proxies {
                is_done &= proxy.update(&fronts, &hosts).await;
            }
            // What HNS refused, because an endpoint was just coming or going, may be possible later.
            let changed = match is_done {
                true => cache.changed().await,
                false => tokio::time::timeout(RETRY, cache.changed()).await.unwrap_or(Ok(())),
            };
            if let Err(error) = changed {
                tracing::error!(%error, "the lab's proxies have lost the datastore and miss changes of Services");
                return;
            }
        }
    }))
}

/// The delay before a failed change is tried again.
const RETRY: std::time::Duration = std::time::Duration::from_secs(1);

/// A node's proxy.
struct Proxy {
    name: String,
    balancers: Balancers,
}

impl Proxy {
    /// Returns whether the node has these Services now.
    async fn update(&mut self, fronts: &Arc<Fronts>, hosts: &Arc<Hosts>) -> bool {
        let result = self.balancers.set(fronts, hosts).await;
        if let Err(error) = &result {
            tracing::warn!(node = self.name, %error, "the node does not have all Services yet; the lab retries");
        }
        result.is_ok()
    }
}

/// The node's address of each pod with a network of its own.
type Hosts = BTreeMap<Ipv4Addr, Ipv4Addr>;

fn hosts(objects: &[&Stored]) -> Hosts {
    let pods = objects.iter().filter(|stored| stored.key.kind == Kind::Pod);
    let address =
        |stored: &Stored, field: &str| stored.value["status"][field].as_str()?.parse::<Ipv4Addr>().ok();
    pods.filter_map(|pod| Some((address(pod, "podIP")?, address(pod, "hostIP")?))).collect()
}

/// The fronts of all Services, also those without backends.
fn fronts(objects: &[&Stored]) -> Fronts {
    let mut slices: BTreeMap<(&str, String), Vec<EndpointSlice>> = BTreeMap::new();
    for stored in objects {
        if let Ok(Resource::EndpointSlice(slice)) = Resource::read(&stored.key, &stored.value)
            && let Some(service) = slice.service()
        {
            slices.entry((&*stored.key.namespace, service.to_owned())).or_default().push(slice);
        }
    }
    let mut fronts = Fronts::new();
    for stored in objects {
        let Ok(Resource::Service(service)) = Resource::read(&stored.key, &stored.value) else { continue };
        let own =
            slices.get(&(&*stored.key.namespace, stored.key.name.clone())).map_or(&[][..], Vec::as_slice);
        let node_ports = stored.value["spec"]["ports"].as_array().into_iter().flatten();
        let node_ports =
            node_ports.map(|port| port["nodePort"].as_u64().and_then(|port| u16::try_from(port).ok()));
        let addresses = addresses_of(&service);
        for (port, node_port) in service.spec.ports.iter().zip(node_ports) {
            let Some(protocol) = Protocol::from_name(port.protocol.as_deref().unwrap_or("TCP")) else {
                continue;
            };
            let backends = backends(own, port.name.as_deref().unwrap_or_default());
            let of_addresses = addresses.iter().map(|address| (Some(*address), port.port));
            let of_nodes =
                node_port.filter(|port| *port > 0 && !addresses.is_empty()).map(|port| (None, port));
            for (address, port) in of_addresses.chain(of_nodes) {
                fronts.entry(Front { address, protocol, port }).or_default().extend(&backends);
            }
        }
    }
    fronts
}

fn addresses_of(service: &Service) -> BTreeSet<Ipv4Addr> {
    let all = service.cluster_ips().into_iter().chain(service.external_ips());
    all.filter_map(|address| match address {
        IpAddr::V4(address) => Some(address),
        IpAddr::V6(_) => None,
    })
    .collect()
}

/// The ready backends of the Service's port of this name; without any, those that still serve while they end.
fn backends(slices: &[EndpointSlice], name: &str) -> BTreeSet<Backend> {
    let with = |is_used: fn(&tortie_api::kubernetes::SliceEndpoint) -> bool| {
        let mut found = BTreeSet::new();
        for slice in slices {
            let ports = slice.ports.iter().filter(|port| port.name.as_deref().unwrap_or_default() == name);
            let endpoints = slice.endpoints.iter().filter(|endpoint| is_used(endpoint));
            let addresses =
                endpoints.flat_map(|endpoint| &endpoint.addresses).filter_map(|text| text.parse().ok());
            let addresses: Vec<Ipv4Addr> = addresses.collect();
            let ports = ports.filter_map(|port| port.port);
            found.extend(ports.flat_map(|port| addresses.iter().map(move |address| (*address, port))));
        }
        found
    };
    let ready = with(|endpoint| endpoint.is_ready());
    if ready.is_empty() { with(|endpoint| endpoint.serves_while_it_ends()) } else { ready }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tortie_api::manifest;
    use tortie_store::Written;

    use super::*;

    #[test]
    fn fronts_lead_to_the_ready_backends_of_their_port() {
        let text = r#"
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  type: NodePort
  clusterIP: 10.96.1.1
  externalIPs: [192.0.2.200]
  ports: [{name: http, port: 80, nodePort: 30080}, {name: dns, port: 53, protocol: UDP}]
---
apiVersion: v1
kind: Service
metadata: {name: headless}
spec: {clusterIP: None, ports: [{port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
endpoints:
- {addresses: [10.0.0.1]}
- {addresses: [10.0.0.2], conditions: {ready: false}}
- {addresses: [10.0.0.3], conditions: {ready: false, serving: true, terminating: true}}
ports: [{name: http, port: 8080}]
"#;
        let stored: Vec<Stored> = manifest::read("m.yml", text)
            .unwrap()
            .into_iter()
            .map(|object| Stored::new(object.key, object.value, Written::at(1)))
            .collect();
        let found = fronts(&stored.iter().collect::<Vec<_>>());
        let front = |address: Option<[u8; 4]>, protocol, port| Front {
            address: address.map(Ipv4Addr::from),
            protocol,
            port,
        };
        let web: BTreeSet<Backend> = [(Ipv4Addr::new(10, 0, 0, 1), 8080)].into();
        let expected: Fronts = [
            (front(Some([10, 96, 1, 1]), Protocol::TCP, 80), web.clone()),
            (front(Some([192, 0, 2, 200]), Protocol::TCP, 80), web.clone()),
            (front(None, Protocol::TCP, 30_080), web),
            (front(Some([10, 96, 1, 1]), Protocol::UDP, 53), BTreeSet::new()),
            (front(Some([192, 0, 2, 200]), Protocol::UDP, 53), BTreeSet::new()),
        ]
        .into();
        assert_eq!(found, expected);

        let mut ending = stored.clone();
        ending[2].value["endpoints"][0]["conditions"] = serde_json::json!({"ready": false});
        let found = fronts(&ending.iter().collect::<Vec<_>>());
        let left = &found[&front(None, Protocol::TCP, 30_080)];
        assert_eq!(
            *left,
            [(Ipv4Addr::new(10, 0, 0, 3), 8080)].into(),
            "a backend that ends is better than none"
        );
    }
}
