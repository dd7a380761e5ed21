//! Prepares the node: its dataplane, and on Windows the network of its pods.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use ipnet::Ipv4Net;
use tokio::time::Instant;
use tortie_api::calico::FelixConfiguration;
use tortie_api::kubernetes::Node;
use tortie_api::net::IpVersion;
use tortie_api::{Key, Kind, Resource};
use tortie_dataplane::{Dataplane, Hold, PodWiring};
use tortie_hcn::{Feature, Hcn, HcnExt as _};
use tortie_ipam::{Ipam, IpamError};
use tortie_store::backoff::{Backoff, random_seed};
use tortie_store::{Endpoints, Store, StoreError};
use tortie_windows::{
    Error, HeldEndpoints, Host, NetworkKind, NetworkSpec, StaticRules, WindowsDataplane, WindowsWiring,
    ensure_network_on, existing_network,
};

use crate::announcement::Announced;
use crate::cluster_network::cluster_network;
use crate::cni_config::IpamSource;
use crate::flannel::OwnLease;
use crate::flannel_etcd::LeaseKeeper;
use crate::flannel_networks::{FlannelNetworks, OnWindows};
use crate::node_address::{AddressFinder, Machine};
use crate::policy_only::PolicyOnly;
use crate::unsupported::LOCKED;
use crate::windows_ipv6::WindowsIpv6;
use crate::{AgentError, Extras, Platform, WindowsNetwork};

/// The maximum delay before reading the Node again, or HNS is called again, while the agent starts.
const MAX_START_DELAY: Duration = Duration::from_secs(1);
/// How long to wait for HNS to create the network.
const NETWORK_TIMEOUT: Duration = Duration::from_secs(60);

/// The result of preparing a node.
pub(crate) struct Prepared {
    pub(crate) dataplane: Box<dyn Dataplane>,
    pub(crate) wiring: Arc<dyn PodWiring>,
    /// What the agent must announce to the other nodes, if anything.
    pub(crate) announced: Option<Announced>,
    /// In a cluster with flannel: where the pods' addresses come from.
    pub(crate) ipam_source: Option<IpamSource>,
    /// With flannel's leases in etcd: what keeps that of the node.
    pub(crate) keeper: Option<LeaseKeeper>,
}

/// The Node, once it exists: the cluster's API or its administrator creates it.
pub(crate) async fn wait_for(store: &dyn Store, name: &str) -> Result<Node, AgentError> {
    wait_for_telling(store, name, |_| {}).await
}

/// As [`wait_for`]. Tells what is missing if it takes long.
pub(crate) async fn wait_for_telling(
    store: &dyn Store,
    name: &str,
    tell: impl Fn(&str),
) -> Result<Node, AgentError> {
    let key = Key::global(Kind::Node, name);
    let mut wait = LongWait::new(Instant::now());
    // If the datastore answered last time.
    let mut known = None;
    let mut backoff = Backoff::new(random_seed()).with_max(MAX_START_DELAY);
    loop {
        let error = match store.get(&key).await {
            Ok(Some(stored)) => {
                return match Resource::read(&key, &stored.value) {
                    Ok(Resource::Node(node)) => Ok(node),
                    other => Err(AgentError::Node {
                        node: name.to_owned(),
                        problem: format!("it cannot be read: {other:?}"),
                    }),
                };
            }
            Ok(None) => None,
            Err(error) => Some(error),
        };
        let has_answered = error.is_none();
        if known.replace(has_answered) != Some(has_answered) {
            match &error {
                None => tracing::info!(node = name, "the Node does not exist yet; Tortie waits for it"),
                Some(error) => tracing::warn!(node = name, %error, "cannot read the Node; Tortie retries"),
            }
        }
        if wait.is_due(has_answered, Instant::now()) {
            let problem = match &error {
                None => match store.keys(Kind::Node).await {
                    Ok(keys) => no_node(name, keys.into_iter().map(|key| key.name).collect()),
                    Err(error) => {
                        format!("Node {name} does not exist, and the others cannot be listed: {error}")
                    }
                },
                Some(error) => format!("Node {name} cannot be read, and Tortie retries: {error}"),
            };
            tracing::error!("{problem}");
            tell(&problem);
        }
        backoff.wait().await;
    }
}

/// The time after which an agent without a Node says that somebody must act.
const LONG_WAIT: Duration = Duration::from_secs(30);

/// A wait for a Node, and what was told about it.
struct LongWait {
    last: Instant,
    /// How long the datastore has not answered, and how long it has answered without the Node, since the last message.
    waited: [Duration; 2],
    /// If the datastore had answered when the problem was told.
    told: Option<bool>,
}

impl LongWait {
    fn new(begun: Instant) -> Self {
        Self { last: begun, waited: [Duration::ZERO; 2], told: None }
    }

    /// Returns whether the problem must be told now: it has lasted for [`LONG_WAIT`] in all, although there may have been another one
    /// meanwhile. It is told again only after the other one.
    fn is_due(&mut self, has_answered: bool, now: Instant) -> bool {
        let waited = &mut self.waited[usize::from(has_answered)];
        *waited += now - std::mem::replace(&mut self.last, now);
        let is_due = *waited >= LONG_WAIT && self.told != Some(has_answered);
        if is_due {
            self.told = Some(has_answered);
            self.waited = [Duration::ZERO; 2];
        }
        is_due
    }
}

/// The maximum number of names in a message.
const MAX_NAMES: usize = 5;

/// The message about a Node that does not exist. The names that begin as this one come first.
fn no_node(name: &str, mut others: Vec<String>) -> String {
    let alike = |other: &String| {
        let same = other.chars().zip(name.chars()).take_while(|(one, two)| one == two);
        std::cmp::Reverse(same.count())
    };
    others.sort_by_key(|other| (alike(other), other.clone()));
    let count = others.len();
    others.truncate(MAX_NAMES);
    let known = match count {
        0 => "there is no Node at all".to_owned(),
        _ if count > MAX_NAMES => format!("of {count} Nodes, these are most like it: {}", others.join(", ")),
        _ => format!("the Nodes are {}", others.join(", ")),
    };
    format!(
        "Node {name} does not exist, and the agent waits for it: {known}. Correct --node (NODENAME), or let the kubelet or an administrator \
         create the Node"
    )
}

/// Waits while the datastore is locked: the node takes addresses for itself.
pub(crate) async fn wait_until_unlocked(store: &dyn Store, tell: impl Fn()) {
    let mut told = false;
    let mut backoff = Backoff::new(random_seed()).with_max(MAX_START_DELAY);
    loop {
        match tortie_store::is_locked(store).await {
            // An agent that may not read the lock reports that later, and applies nothing.
            Ok(false) | Err(StoreError::Forbidden(_)) => return,
            Ok(true) => tell(),
            Err(error) => {
                tracing::warn!(%error, "cannot read whether the datastore is locked; Tortie retries");
                backoff.wait().await;
                continue;
            }
        }
        if !told {
            tracing::error!("ClusterInformation default: {LOCKED}; the agent waits");
            told = true;
        }
        backoff.wait().await;
    }
}

/// How many blocks the node's network can have. HNS may still be starting. A Windows node that does not answer for long has
/// one, until its agent starts again.
pub(crate) async fn most_blocks(hcn: Option<Arc<dyn Hcn>>) -> u32 {
    let Some(hcn) = hcn else { return u32::MAX };
    let deadline = Instant::now() + NETWORK_TIMEOUT;
    let mut backoff = Backoff::new(random_seed()).with_max(MAX_START_DELAY);
    loop {
        let asked = hcn.clone();
        match tokio::task::spawn_blocking(move || asked.version()).await {
            Ok(Ok(version)) if version.supports(Feature::SeveralSubnets) => return u32::MAX,
            Ok(Ok(_)) => return 1,
            error if Instant::now() >= deadline => {
                tracing::warn!(?error, "HNS does not answer the version request; the node uses one block");
                return 1;
            }
            error => tracing::debug!(?error, "HNS does not answer the version request; Tortie retries"),
        }
        backoff.wait().await;
    }
}

/// Opens what keeps pods closed while the node's state is unknown.
pub(crate) type OpenHold = Box<dyn FnOnce() -> Result<Box<dyn Hold>, AgentError> + Send>;

/// What keeps pods of the platform closed, if anything can.
pub(crate) fn hold_opener(platform: &Platform, extras: &Extras) -> Option<OpenHold> {
    match platform {
        #[cfg(target_os = "linux")]
        Platform::Linux => {
            let config = linux_config(extras);
            Some(Box::new(move || {
                let held = tortie_linux::dataplane::HeldTable::open(config);
                Ok(Box::new(held.map_err(|error| AgentError::system("opening the dataplane", error))?))
            }))
        }
        Platform::Windows { hcn, .. } => {
            let policy_only = extras.policy_only.clone();
            let policy_only = policy_only.map(|it| tortie_windows::PolicyOnly { results: it.results });
            let held = HeldEndpoints::new(hcn.clone()).with_policy_only(policy_only);
            Some(Box::new(move || Ok(Box::new(held))))
        }
        Platform::Other { .. } => None,
    }
}

/// Sets up the node's tunnel end and announces it.
pub(crate) async fn prepare(
    store: &dyn Endpoints,
    ipam: &Ipam,
    node: &str,
    platform: Platform,
    extras: &Extras,
) -> Result<Prepared, AgentError> {
    match platform {
        #[cfg(target_os = "linux")]
        Platform::Linux => match &extras.policy_only {
            Some(_) => open_linux(linux_config(extras), None),
            None => prepare_linux(store, ipam, node, extras).await,
        },
        Platform::Windows { hcn, static_rules, host, services, network } => {
            let windows = WindowsNode { hcn, static_rules, host, services, network };
            match &extras.policy_only {
                Some(policy_only) => Ok(policy_only_windows(policy_only, windows)),
                None => prepare_windows(store, ipam, node, windows, extras).await,
            }
        }
        Platform::Other { .. } if extras.address_methods.ask_the_machine() => Err(AgentError::Node {
            node: node.to_owned(),
            problem: "it has no interfaces to look at; remove --ip-autodetection-method and --ip6-autodetection-method \
                      (TORTIE_IP_AUTODETECTION_METHOD, TORTIE_IP6_AUTODETECTION_METHOD)"
                .to_owned(),
        }),
        Platform::Other { dataplane, wiring } => {
            Ok(Prepared { dataplane, wiring, announced: None, ipam_source: None, keeper: None })
        }
    }
}

/// Linux: the MAC address of the tunnel is derived from the node's name.
#[cfg(target_os = "linux")]
async fn prepare_linux(
    store: &dyn Endpoints,
    ipam: &Ipam,
    node: &str,
    extras: &Extras,
) -> Result<Prepared, AgentError> {
    let (announced, keeper) = Announced::on_linux(store, ipam, node, extras).await?;
    let families = announced.families();
    let prepared = open_linux(linux_config(extras), Some(announced))?;
    let wiring = prepared.wiring.clone();
    let ipam_source =
        families.map(|families| IpamSource::Flannel(families, Box::new(move || wiring.has_ipv6())));
    Ok(Prepared { ipam_source, keeper, ..prepared })
}

/// The configuration of the dataplane, also for pods that another plugin connects.
#[cfg(target_os = "linux")]
fn linux_config(extras: &Extras) -> tortie_linux::dataplane::Config {
    let policy_only = extras.policy_only.clone();
    let policy_only = policy_only
        .map(|PolicyOnly { prefixes, results }| tortie_linux::dataplane::PolicyOnly { prefixes, results });
    tortie_linux::dataplane::Config { policy_only, ..Default::default() }
}

#[cfg(target_os = "linux")]
fn open_linux(
    config: tortie_linux::dataplane::Config,
    announced: Option<Announced>,
) -> Result<Prepared, AgentError> {
    let opened = |what: &str| {
        let what = what.to_owned();
        move |error| AgentError::system(what, error)
    };
    let wiring = tortie_linux::wire::Wiring::open(&config).map_err(opened("preparing to connect pods"))?;
    let dataplane =
        tortie_linux::dataplane::Dataplane::open(config).map_err(opened("opening the dataplane"))?;
    let wiring = Arc::new(wiring.with_pod_mtu(dataplane.pod_mtu()));
    let dataplane = Box::new(dataplane);
    Ok(Prepared { dataplane, wiring, announced, ipam_source: None, keeper: None })
}

/// The parts of [`Platform::Windows`].
struct WindowsNode {
    hcn: Arc<dyn Hcn>,
    static_rules: StaticRules,
    host: Host,
    services: Vec<Ipv4Net>,
    network: WindowsNetwork,
}

/// Windows: the dataplane for pods that another plugin connects. No network is made, so there is nothing to announce.
fn policy_only_windows(policy_only: &PolicyOnly, windows: WindowsNode) -> Prepared {
    let WindowsNode { hcn, static_rules, host, services, network: _ } = windows;
    let results = policy_only.results.clone();
    let dataplane = WindowsDataplane::new(hcn.clone()).with_host(host).with_static_rules(static_rules);
    let dataplane =
        dataplane.with_services(services).with_policy_only(tortie_windows::PolicyOnly { results });
    let wiring = Arc::new(WindowsWiring::new(hcn));
    Prepared { dataplane: Box::new(dataplane), wiring, announced: None, ipam_source: None, keeper: None }
}

/// Windows: the network is created from the node's block. On an overlay, its gateway is the tunnel address, and HNS chooses the MAC
/// address.
async fn prepare_windows(
    store: &dyn Endpoints,
    ipam: &Ipam,
    node: &str,
    windows: WindowsNode,
    extras: &Extras,
) -> Result<Prepared, AgentError> {
    let WindowsNode { hcn, static_rules, host, services, network } = windows;
    let methods = extras.address_methods.clone();
    let finder = AddressFinder { methods, machine: Machine::Windows(host.clone()) };
    let kind = network_kind(store, node, network).await?;
    let asked = hcn.clone();
    let found = tokio::task::spawn_blocking(move || existing_network(&asked, tortie_windows::NETWORK)).await;
    let found = found.ok().and_then(Result::ok);
    let (has_network, mac) = (found.is_some(), found.and_then(|found| found.router_mac));
    let networks =
        FlannelNetworks::read(store, node, &finder, extras, Some(OnWindows { network, mac })).await?;
    let mut blocks = match &networks.lease {
        Some(lease) => vec![lease.windows_block(node, network)?],
        None => ipam.ensure_blocks().await?,
    }
    .into_iter();
    let block = blocks.next().ok_or_else(|| IpamError::NoPool(format!("node {node}")))?;
    let others: Vec<Ipv4Net> = blocks.collect();
    let address = windows_address(store, node, &finder, has_network || !host.needs_address()).await?;
    let may_have_ipv6 = network == WindowsNetwork::L2Bridge && !extras.flannel;
    let windows_ipv6 = may_have_ipv6.then(|| WindowsIpv6::new(hcn.clone(), host.clone()));
    let ipv6 = match &windows_ipv6 {
        Some(ipv6) => {
            let has_address = address_of(store, node, &finder, IpVersion::V6).await?.is_some();
            ipv6.ensure_block(ipam, has_address).await?
        }
        None => None,
    };
    let name = tortie_windows::NETWORK.to_owned();
    let spec = NetworkSpec { name, block, ipv6, kind, adapter: None };
    let deadline = Instant::now() + NETWORK_TIMEOUT;
    let mut backoff = Backoff::new(random_seed()).with_max(MAX_START_DELAY);
    let made = loop {
        let (asked, spec, others, host) = (hcn.clone(), spec.clone(), others.clone(), host.clone());
        // A call of HNS may take long, and must not block the other tasks.
        let make = move || match ensure_network_on(&asked, &spec, &others, (&host, address)) {
            // Without an agent, nobody would end its pods, and it would never be replaced. The dataplane reports it.
            Err(error @ (Error::NetworkDiffers { .. } | Error::AdapterDiffers { .. })) => {
                tracing::warn!(%error, "the agent starts with the network as it is");
                existing_network(&asked, &spec.name)
            }
            made => made,
        };
        let made = tokio::task::spawn_blocking(make).await;
        match made.map_err(|error| AgentError::system("making the network of the pods", error))? {
            Ok(made) => break made,
            Err(error) if error.is_passing() && Instant::now() < deadline => {
                tracing::info!(%error, "the network of the pods is not ready; Tortie retries");
                backoff.wait().await;
            }
            Err(error) => return Err(AgentError::system("making the network of the pods", error)),
        }
    };
    let network_lock = host.network_lock().clone();
    let dataplane = WindowsDataplane::new(hcn.clone()).with_host(host);
    let dataplane = dataplane.with_bridge(network == WindowsNetwork::L2Bridge);
    let dataplane = dataplane.with_static_rules(static_rules).with_services(services);
    let current = dataplane.current_network();
    let wiring = WindowsWiring::new(hcn).with_networks(dataplane.networks());
    let wiring = wiring.with_pod_network(current.clone()).with_network_lock(network_lock);
    let ipam_source = networks.lease.as_ref().and_then(OwnLease::windows_addresses).map(IpamSource::Fixed);
    let (announced, keeper) =
        Announced::on_windows(store, node, (&made, current), finder, networks, windows_ipv6).await?;
    Ok(Prepared {
        dataplane: Box::new(dataplane),
        wiring: Arc::new(wiring),
        announced: Some(announced),
        ipam_source,
        keeper,
    })
}

/// The node's own address of a family: what a method finds, what somebody has annotated, or what the kubelet reports.
async fn address_of(
    store: &dyn Endpoints,
    node: &str,
    finder: &AddressFinder,
    version: IpVersion,
) -> Result<Option<IpAddr>, AgentError> {
    let known = wait_for(store, node).await?;
    let found = finder.find(version, known.own_address(version)).await;
    let found = found.map_err(|problem| AgentError::Node { node: node.to_owned(), problem })?;
    let known = || known.own_address(version).or_else(|| known.reported_address(version));
    Ok(found.map(|net| net.addr()).or_else(known))
}

/// The IPv4 address of a Windows node. It tells the adapter of the network, and a cloud's controller may report it some time after the
/// kubelet has registered the node.
async fn windows_address(
    store: &dyn Endpoints,
    node: &str,
    finder: &AddressFinder,
    is_optional: bool,
) -> Result<Option<Ipv4Addr>, AgentError> {
    let mut told = false;
    let mut backoff = Backoff::new(random_seed()).with_max(MAX_START_DELAY);
    loop {
        match address_of(store, node, finder, IpVersion::V4).await? {
            Some(IpAddr::V4(address)) => return Ok(Some(address)),
            _ if is_optional => return Ok(None),
            _ => {}
        }
        if !told {
            tracing::warn!(
                node,
                "the Node has no IPv4 address, which tells the network adapter for pods; Tortie waits for it. Name the adapter (--adapter), or \
                 let the kubelet report an address (--node-ip)"
            );
            told = true;
        }
        backoff.wait().await;
    }
}

/// The type of the network that the node must have.
async fn network_kind(
    store: &dyn Endpoints,
    node: &str,
    network: WindowsNetwork,
) -> Result<NetworkKind, AgentError> {
    if network == WindowsNetwork::L2Bridge {
        return Ok(NetworkKind::L2Bridge);
    }
    let vni = cluster_network(store, node).await?.vni;
    let lowest = FelixConfiguration::LOWEST_WINDOWS_VNI;
    if vni < lowest {
        return Err(AgentError::Node {
            node: node.to_owned(),
            problem: format!(
                "vxlanVNI of FelixConfiguration is {vni}, and Windows nodes need at least {lowest}; all nodes of a \
                 cluster need the same"
            ),
        });
    }
    Ok(NetworkKind::Overlay { vni })
}

#[cfg(test)]
mod tests {
    use tortie_dataplane::ClusterNetwork;

    use super::*;
    use serde_json::json;
    use tortie_store::Embedded;

    #[tokio::test]
    async fn the_network_is_that_of_the_settings_of_the_node_and_of_all_nodes() {
        let store = Embedded::in_memory().unwrap();
        let vni = async || cluster_network(&store, "n").await.unwrap().vni;
        assert_eq!(vni().await, ClusterNetwork::default().vni);
        for (name, value, expected) in
            [("node.other", 7000, 4096), ("default", 5000, 5000), ("node.n", 6000, 6000)]
        {
            let spec = json!({"metadata": {"name": name}, "spec": {"vxlanVNI": value}});
            store.create(&Key::global(Kind::FelixConfiguration, name), spec).await.unwrap();
            assert_eq!(vni().await, expected, "{name}");
        }
    }

    #[test]
    fn an_agent_without_a_node_names_those_that_there_are() {
        let names = |names: &[&str]| -> Vec<String> { names.iter().map(|name| (*name).to_owned()).collect() };
        for (others, expected) in [
            (&[][..], "there is no Node at all"),
            (&["a", "node-2"], "the Nodes are node-2, a."),
            (
                &["a", "b", "c", "d", "node", "node-2"],
                "of 6 Nodes, these are most like it: node-2, node, a, b, c.",
            ),
        ] {
            let message = no_node("node-1", names(others));
            for part in [expected, "Node node-1 does not exist", "--node"] {
                assert!(message.contains(part), "{part}: {message}");
            }
        }
    }

    #[test]
    fn a_long_wait_is_told_although_the_datastore_answers_now_and_then() {
        let begun = Instant::now();
        let told = |has_answered: fn(u64) -> bool| -> Vec<u64> {
            let mut wait = LongWait::new(begun);
            let due = |second: &u64| wait.is_due(has_answered(*second), begun + Duration::from_secs(*second));
            (0..100).filter(due).collect()
        };
        assert_eq!(told(|_| true), [30]);
        assert_eq!(told(|_| false), [30]);
        assert_eq!(told(|second| second.is_multiple_of(2)), [59]);
        assert_eq!(told(|second| second > 40), [30, 70]);
        assert_eq!(told(|second| second > 20), [50]);
    }

    /// An agent with a wrong name must not wait in silence, and one without an answer says so.
    #[tokio::test(start_paused = true)]
    async fn who_waits_for_long_says_for_what() {
        let store = Arc::new(Embedded::in_memory().unwrap());
        for name in ["primary", "linux-2"] {
            store.create(&Key::global(Kind::Node, name), json!({"metadata": {"name": name}})).await.unwrap();
        }
        let told = Arc::new(std::sync::Mutex::new(Vec::new()));
        let (asked, tell) = (store.clone(), told.clone());
        let waiting = tokio::spawn(async move {
            wait_for_telling(&*asked, "primarx", |text| tell.lock().unwrap().push(text.to_owned())).await
        });
        let begun = Instant::now();
        while told.lock().unwrap().is_empty() {
            assert!(begun.elapsed() < LONG_WAIT * 1000, "nothing is told");
            // The store's thread needs real time.
            std::thread::sleep(Duration::from_millis(1));
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        assert!(begun.elapsed() >= LONG_WAIT);
        let text = told.lock().unwrap().clone();
        assert!(text.len() == 1 && text[0].contains("the Nodes are primary, linux-2"), "{text:?}");
        let node = json!({"metadata": {"name": "primarx"}});
        store.create(&Key::global(Kind::Node, "primarx"), node).await.unwrap();
        assert_eq!(waiting.await.unwrap().unwrap().metadata.name, "primarx");
    }
}
