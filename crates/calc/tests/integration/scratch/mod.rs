//! The node's state computed from scratch, directly by the definition: no index, no memory.

mod claims;
mod network;
mod services;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use serde_json::Value;
use tortie_api::calico::{
    EndpointToHostAction, FelixConfigurationSpec, HostEndpointSpec, NatOutgoingExclusions, TierDefault,
    WorkloadEndpointPort, WorkloadEndpointSpec,
};
use tortie_api::net::{Action, Protocol};
use tortie_api::{Key, Kind, Resource};
use tortie_dataplane::{
    Delta, Endpoint, EndpointId, HostEndpoint, HostPort, NodeState, RouteTarget, Settings,
};
use tortie_policy::program::{
    EndOfTier, EndpointProgram, HostEndpointProgram, Member, PolicyId, PolicyRules, Rule, SetId, TierProgram,
};
use tortie_policy::{
    ALL_NODES, Compiled, Hook, OwnLabels, SetSource, SubjectLabels, compile, compile_profile,
    namespace_profile, readable_order,
};
use tortie_selector::Selector;

pub(crate) use network::WithoutRoute;
use network::network_from_scratch;

pub(crate) const NODE: &str = "n0";
pub(crate) type Objects = BTreeMap<Key, Value>;

type Labels = BTreeMap<String, String>;
type Backends = Vec<(IpAddr, Protocol, u16)>;

/// The subjects of selectors, and the backends of Services.
struct Subjects {
    pods: Vec<(Key, WorkloadEndpointSpec, SubjectLabels)>,
    hosts: Vec<(Key, HostEndpointSpec, SubjectLabels)>,
    network_sets: Vec<(SubjectLabels, Vec<IpNet>)>,
    /// Namespace and name of a Service, and some of its backends: addresses, and addresses with ports.
    backends: Vec<(String, String, Vec<IpAddr>, Backends)>,
    /// The labels and addresses of nodes.
    nodes: Vec<(Labels, Vec<IpAddr>)>,
}

fn host_port(port: &WorkloadEndpointPort) -> Option<HostPort> {
    let address = port.host_ip.as_deref().map(|address| address.parse().expect("the tests write addresses"));
    let protocol = Protocol::from_name(&port.port.protocol)?;
    Some(HostPort { protocol, address, port: port.host_port?, pod_port: port.port.port })
}

/// The state of a node that needs Services.
pub(crate) fn from_scratch(objects: &Objects) -> NodeState {
    from_scratch_with(objects, false).0
}

/// The state of a node that may use direct routes, and the blocks and borrowed addresses that lack theirs.
pub(crate) fn from_scratch_with(objects: &Objects, direct: bool) -> (NodeState, WithoutRoute) {
    let mut state = NodeState::default();
    let policies: Vec<Compiled> = objects.iter().filter_map(|(key, value)| compile(key, value)).collect();
    let subjects = subjects(objects);
    for (_, spec, labels) in subjects.pods.iter().filter(|(_, spec, _)| spec.node == NODE) {
        let program = EndpointProgram {
            ingress: tiers(objects, &policies, labels, |policy| policy.hook.is_for_pods() && policy.ingress),
            egress: tiers(objects, &policies, labels, |policy| policy.hook.is_for_pods() && policy.egress),
            profiles: profiles(objects, &spec.profiles, &subjects, &mut state),
        };
        let id = EndpointId {
            namespace: labels.namespace.clone(),
            pod: spec.pod.as_str().into(),
            interface: spec.endpoint.as_str().into(),
        };
        let addresses: BTreeSet<IpAddr> = spec.ip_networks.iter().map(IpNet::addr).collect();
        let endpoint = Endpoint {
            container_id: spec.container_id.as_str().into(),
            host_interface: spec.interface_name.as_str().into(),
            addresses: addresses.into_iter().collect(),
            mac: spec.mac.parse().ok(),
            host_ports: spec.ports.iter().filter_map(host_port).collect(),
            program: Arc::new(program),
        };
        // Of two objects with one endpoint id, the last counts.
        state.endpoints.insert(id, Arc::new(endpoint));
    }
    for (key, spec, labels) in subjects.hosts.iter().filter(|(_, spec, _)| spec.node == NODE) {
        let endpoint = host(objects, &policies, spec, labels, &subjects, &mut state);
        state.host_endpoints.insert(key.name.clone(), Arc::new(endpoint));
    }
    let of_pods = state.endpoints.values().flat_map(|endpoint| endpoint.program.policy_ids());
    let of_hosts = state.host_endpoints.values().flat_map(|endpoint| endpoint.program.policy_ids());
    let all_named: BTreeSet<PolicyId> = of_pods.chain(of_hosts).cloned().collect();
    let named = |id: &PolicyId| all_named.contains(id);
    for policy in policies.iter().filter(|policy| named(&policy.id)) {
        state.policies.insert(policy.id.clone(), policy.rules.clone());
        name_sets(&policy.sets, &subjects, &mut state);
    }
    state.policies.retain(|id, _| named(id));
    let sets: BTreeSet<&SetId> = state.policies.values().flat_map(|rules| rules.set_ids()).collect();
    state.sets.retain(|id, _| sets.contains(id));
    let all_nodes = BTreeMap::from([(ALL_NODES.clone(), SetSource::Nodes(Selector::all()))]);
    name_sets(&all_nodes, &subjects, &mut state);
    let without_route = network_from_scratch(objects, &mut state, direct);
    let settings = Arc::new(settings(objects));
    (NodeState { settings, services: services::services(objects), ..state }, without_route)
}

/// The node's own settings take precedence over those of all nodes; unreadable settings close the node itself.
fn felix_of(objects: &Objects) -> FelixConfigurationSpec {
    felix_of_node(objects, NODE)
}

fn felix_of_node(objects: &Objects, node: &str) -> FelixConfigurationSpec {
    let felix = |name: &str| {
        let key = Key::global(Kind::FelixConfiguration, name);
        match objects.get(&key).map(|value| Resource::read_what_can_be(&key, value).0) {
            Some(Some(Resource::FelixConfiguration(felix))) => felix.spec,
            Some(_) => FelixConfigurationSpec {
                default_endpoint_to_host_action: Some(EndpointToHostAction::Drop),
                ..FelixConfigurationSpec::default()
            },
            None => FelixConfigurationSpec::default(),
        }
    };
    felix(&format!("node.{node}")).or(&felix("default"))
}

/// The addresses that nodes announce.
fn node_addresses(objects: &Objects) -> BTreeSet<IpAddr> {
    let mut addresses = BTreeSet::new();
    for (key, value) in objects {
        if let Ok(Resource::Node(node)) = Resource::read(key, value) {
            addresses.extend(node.address().map(IpAddr::V4));
            addresses.extend(node.address_v6().map(IpAddr::V6));
        }
    }
    addresses
}

fn settings(objects: &Objects) -> Settings {
    let pools = objects.iter().filter_map(|(key, value)| match Resource::read(key, value) {
        Ok(Resource::IpPool(pool)) => Some((pool.spec.cidr, pool.spec.nat_outgoing)),
        _ => None,
    });
    let mut settings = Settings::new(&felix_of(objects), pools.collect());
    if felix_of(objects).nat_outgoing_exclusions == Some(NatOutgoingExclusions::PoolsAndNodes) {
        settings.nat_exceptions = node_addresses(objects);
    }
    // Every node may listen on a port of its own.
    for name in ["default", "node.n0", "node.n1", "node.n2"] {
        let key = Key::global(Kind::FelixConfiguration, name);
        if let Some(Some(Resource::FelixConfiguration(felix))) =
            objects.get(&key).map(|it| Resource::read_what_can_be(&key, it).0)
        {
            settings.vxlan_ports.extend(felix.spec.vxlan_port.filter(|port| *port != 0));
        }
    }
    for name in ["default", "node.n0", "node.n1", "node.n2"] {
        let key = Key::global(Kind::BgpConfiguration, name);
        if let Some(Some(Resource::BgpConfiguration(bgp))) =
            objects.get(&key).map(|it| Resource::read_what_can_be(&key, it).0)
        {
            settings.bgp_ports.extend(bgp.spec.listen_port.filter(|port| *port != 0));
        }
    }
    settings
}

/// The profiles with rules, up to the first that does not exist; records their rules.
fn profiles(
    objects: &Objects,
    names: &[String],
    subjects: &Subjects,
    state: &mut NodeState,
) -> Vec<PolicyId> {
    let mut profiles = Vec::new();
    for name in names {
        let id = PolicyId::profile(name.as_str());
        let namespace = name.strip_prefix("kns.").map(|namespace| Key::global(Kind::Namespace, namespace));
        if let Some((_, rules, sets)) = profile(objects, name) {
            state.policies.insert(id.clone(), Arc::new(rules));
            name_sets(&sets, subjects, state);
        } else if name == "projectcalico-default-allow"
            || namespace.is_some_and(|namespace| given(objects, &namespace).is_some())
        {
            state.policies.insert(id.clone(), Arc::new(namespace_profile("").1));
        } else {
            let account = name.strip_prefix("ksa.").and_then(|account| account.split_once('.'));
            let account =
                account.map(|(namespace, name)| Key::namespaced(Kind::ServiceAccount, namespace, name));
            if account.is_some_and(|account| given(objects, &account).is_some()) {
                continue;
            }
            break;
        }
        profiles.push(id);
    }
    profiles
}

fn host(
    objects: &Objects,
    policies: &[Compiled],
    spec: &HostEndpointSpec,
    labels: &SubjectLabels,
    subjects: &Subjects,
    state: &mut NodeState,
) -> HostEndpoint {
    let table = |hooks: &[Hook], ends: bool| {
        let applies = |policy: &Compiled| policy.hook == Hook::Everywhere || hooks.contains(&policy.hook);
        let mut table = EndpointProgram {
            ingress: tiers(objects, policies, labels, |policy| applies(policy) && policy.ingress),
            egress: tiers(objects, policies, labels, |policy| applies(policy) && policy.egress),
            profiles: vec![],
        };
        for tier in table.ingress.iter_mut().chain(&mut table.egress).filter(|_| !ends) {
            tier.end = EndOfTier::Pass;
        }
        table
    };
    let mut normal = table(&[Hook::Normal, Hook::AlsoForwarded], true);
    normal.profiles = profiles(objects, &spec.profiles, subjects, state);
    let program = HostEndpointProgram {
        untracked: match spec.interface_name.as_deref() {
            Some("*") => EndpointProgram::default(),
            _ => table(&[Hook::Untracked], false),
        },
        pre_dnat: table(&[Hook::PreDnat], false),
        forward: table(&[Hook::AlsoForwarded], true),
        normal,
    };
    let addresses: BTreeSet<IpAddr> = spec.expected_ips.iter().copied().collect();
    HostEndpoint {
        interface: spec.interface_name.clone(),
        addresses: addresses.into_iter().collect(),
        program,
    }
}

/// The labels and rules of a stored profile. One that cannot be understood has no labels and denies everything.
fn profile(objects: &Objects, name: &str) -> Option<(Labels, PolicyRules, BTreeMap<SetId, SetSource>)> {
    let key = Key::global(Kind::Profile, name);
    Some(match Resource::read(&key, objects.get(&key)?) {
        Ok(Resource::Profile(profile)) => {
            let (rules, sets) = compile_profile(&profile);
            (profile.spec.labels_to_apply, rules, sets)
        }
        _ => {
            let deny = vec![Rule::all(Action::Deny)];
            (Labels::new(), PolicyRules { ingress: deny.clone(), egress: deny }, BTreeMap::new())
        }
    })
}

/// The labels of a namespace or service account, if it exists and can be read.
fn given(objects: &Objects, key: &Key) -> Option<OwnLabels> {
    match Resource::read_what_can_be(key, objects.get(key)?).0? {
        Resource::Namespace(namespace) => Some(namespace.metadata.labels.into()),
        Resource::ServiceAccount(account) => Some(account.metadata.labels.into()),
        other => panic!("{other:?}"),
    }
}

fn subjects(objects: &Objects) -> Subjects {
    let mut subjects =
        Subjects { pods: vec![], hosts: vec![], network_sets: vec![], backends: vec![], nodes: vec![] };
    for (key, value) in objects {
        let namespace_labels = given(objects, &Key::global(Kind::Namespace, &key.namespace));
        let namespaced = SubjectLabels {
            namespace: key.namespace.as_str().into(),
            namespace_labels,
            ..Default::default()
        };
        match Resource::read_what_can_be(key, value).0 {
            Some(Resource::WorkloadEndpoint(mut endpoint)) => {
                if endpoint.is_unreported() {
                    let WorkloadEndpointSpec { pod, node, ip_networks, .. } = &mut endpoint.spec;
                    claims::retain(objects, key, pod, node, ip_networks);
                    if ip_networks.is_empty() {
                        continue;
                    }
                }
                let account = &endpoint.spec.service_account_name;
                let profiles = endpoint.spec.profiles.iter().filter_map(|name| profile(objects, name));
                let labels = SubjectLabels {
                    is_pod: true,
                    own: endpoint.metadata.labels.into(),
                    service_account: account.as_str().into(),
                    service_account_labels: given(
                        objects,
                        &Key::namespaced(Kind::ServiceAccount, &key.namespace, account),
                    ),
                    profiles: profiles.map(|(labels, ..)| labels.into()).collect(),
                    ..namespaced
                };
                subjects.pods.push((key.clone(), endpoint.spec, labels));
            }
            Some(Resource::HostEndpoint(host)) => {
                let profiles = host.spec.profiles.iter().filter_map(|name| profile(objects, name));
                let labels = SubjectLabels {
                    own: host.metadata.labels.into(),
                    profiles: profiles.map(|(labels, ..)| labels.into()).collect(),
                    ..SubjectLabels::default()
                };
                subjects.hosts.push((key.clone(), host.spec, labels));
            }
            Some(Resource::NetworkSet(set) | Resource::GlobalNetworkSet(set)) => {
                let labels = SubjectLabels { own: set.metadata.labels.into(), ..namespaced };
                let nets = set.spec.nets.iter().map(|net| net.0).collect();
                subjects.network_sets.push((labels, nets));
            }
            Some(Resource::Node(node)) => {
                subjects.nodes.push((node.metadata.labels.clone(), node.addresses()));
            }
            Some(Resource::EndpointSlice(slice)) => {
                let service = slice.service().unwrap_or_default().to_owned();
                let addresses = slice.addresses().collect();
                subjects.backends.push((
                    key.namespace.clone(),
                    service,
                    addresses,
                    slice.backends().collect(),
                ));
            }
            _ => {}
        }
    }
    subjects
}

fn name_sets(sets: &BTreeMap<SetId, SetSource>, subjects: &Subjects, state: &mut NodeState) {
    for (id, source) in sets {
        state.sets.insert(id.clone(), (source.kind(), members(source, subjects).into()));
    }
}

fn members(source: &SetSource, subjects: &Subjects) -> BTreeSet<Member> {
    match source {
        SetSource::Selector(selector) => {
            let pods = subjects.pods.iter().filter(|(_, _, labels)| selector.matches(labels));
            let addresses =
                pods.flat_map(|(_, spec, _)| spec.ip_networks.iter().map(|net| IpNet::from(net.addr())));
            let nets = subjects.network_sets.iter().filter(|(labels, _)| selector.matches(labels));
            let hosts = subjects.hosts.iter().filter(|(_, _, labels)| selector.matches(labels));
            let of_hosts = hosts.flat_map(|(_, spec, _)| spec.expected_ips.iter().map(|ip| IpNet::from(*ip)));
            let nets = nets.flat_map(|(_, nets)| nets.iter().copied());
            addresses.chain(of_hosts).chain(nets).map(Member::Net).collect()
        }
        SetSource::Nodes(selector) => {
            let nodes = subjects.nodes.iter().filter(|(labels, _)| selector.matches(labels));
            nodes.flat_map(|(_, addresses)| addresses.iter().map(|ip| Member::Net((*ip).into()))).collect()
        }
        SetSource::NamedPort { selector, protocol, name } => {
            let mut members = BTreeSet::new();
            let pods = subjects.pods.iter().filter(|(_, _, labels)| selector.matches(labels));
            let pods = pods.map(|(_, spec, _)| {
                let ports: Vec<_> = spec.ports.iter().map(|port| &port.port).collect();
                (spec.ip_networks.iter().map(IpNet::addr).collect(), ports)
            });
            let hosts = subjects.hosts.iter().filter(|(_, _, labels)| selector.matches(labels));
            let hosts = hosts.map(|(_, spec, _)| (spec.expected_ips.clone(), spec.ports.iter().collect()));
            for (addresses, ports) in pods.chain(hosts) {
                let addresses: Vec<IpAddr> = addresses;
                for port in ports.into_iter().filter(|port| port.name == *name) {
                    let declared = Protocol::from_name(&port.protocol);
                    let Some(declared) = declared.filter(|it| protocol.is_none_or(|wanted| wanted == *it))
                    else {
                        continue;
                    };
                    members.extend(addresses.iter().map(|address| Member::AddressPort {
                        address: *address,
                        protocol: declared,
                        port: port.port,
                    }));
                }
            }
            members
        }
        SetSource::Service { namespace, name, with_ports } => {
            let meant =
                subjects.backends.iter().filter(|(of, service, ..)| of == namespace && service == name);
            let mut members = BTreeSet::new();
            for (_, _, addresses, backends) in meant {
                if *with_ports {
                    let port = |&(address, protocol, port)| Member::AddressPort { address, protocol, port };
                    members.extend(backends.iter().map(port));
                } else {
                    members.extend(addresses.iter().map(|address| Member::Net((*address).into())));
                }
            }
            members
        }
    }
}

/// Tier by tier: stored tiers and those of every cluster by order, then the unknown ones.
fn tiers(
    objects: &Objects,
    policies: &[Compiled],
    labels: &SubjectLabels,
    speaks: impl Fn(&Compiled) -> bool,
) -> Vec<TierProgram> {
    let mut names: Vec<&str> = policies.iter().map(|policy| policy.tier.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    let described = |name: &str| {
        let key = Key::global(Kind::Tier, name);
        let stored = objects.get(&key).map(|value| match Resource::read(&key, value) {
            Ok(Resource::Tier(tier)) => {
                (tier.spec.order, tier.spec.default_action == Some(TierDefault::Pass))
            }
            _ => (readable_order(&value["spec"]), false),
        });
        let of_every_cluster = match name {
            "" => Some((Some(f64::NEG_INFINITY), false)),
            "kube-admin" => Some((Some(1e3), true)),
            "default" => Some((Some(1e6), false)),
            "kube-baseline" => Some((Some(1e7), true)),
            _ => None,
        };
        // Nobody can change the order of the tiers of every cluster; their stored default action counts.
        let (order, _) = of_every_cluster.or(stored)?;
        let (_, pass) = stored.or(of_every_cluster)?;
        Some((order.unwrap_or(f64::INFINITY), pass))
    };
    let place = |name: &&str| described(name).map_or(f64::NAN, |(order, _)| order);
    // NaN sorts after infinity: unknown tiers come last.
    names.sort_by(|a, b| place(a).total_cmp(&place(b)).then(a.cmp(b)));
    let tier = |name: &str| {
        let applies =
            |policy: &&Compiled| policy.tier == name && speaks(policy) && policy.selector.matches(labels);
        let mut selected: Vec<&Compiled> = policies.iter().filter(applies).collect();
        selected.sort_by(|a, b| a.order.cmp(&b.order));
        let end =
            if described(name).is_some_and(|(_, pass)| pass) { EndOfTier::Pass } else { EndOfTier::Deny };
        let policies: Vec<PolicyId> = selected.iter().map(|policy| policy.id.clone()).collect();
        (!policies.is_empty()).then(|| TierProgram { name: name.into(), policies, end })
    };
    names.into_iter().filter_map(tier).collect()
}

/// Applies the deltas one by one: each must change something, and leave no reference to a missing object.
pub(crate) fn apply_strictly(state: &mut NodeState, deltas: &[Delta]) {
    for delta in deltas {
        let before = state.clone();
        state.apply(delta);
        assert_ne!(&before, state, "{delta:?} changes nothing");
        for (id, rules) in &state.policies {
            for set in rules.set_ids() {
                assert!(
                    state.sets.contains_key(set),
                    "after {delta:?}, {id} names the set {set}, which is not there"
                );
            }
        }
        for (id, endpoint) in &state.endpoints {
            for policy in endpoint.program.policy_ids() {
                assert!(
                    state.policies.contains_key(policy),
                    "after {delta:?}, {id} names {policy}, which is not there"
                );
            }
        }
        for policy in state.host_endpoints.values().flat_map(|endpoint| endpoint.program.policy_ids()) {
            assert!(state.policies.contains_key(policy), "after {delta:?}, a host endpoint names {policy}");
        }
        for (net, target) in &state.routes {
            if let RouteTarget::Vxlan { node } = target {
                assert!(
                    state.vtep(node, &net.addr()).is_some(),
                    "after {delta:?}, a route leads to {node}, which has no VTEP"
                );
            }
        }
    }
}

/// The deltas required between two states: all differences, and nothing else. As texts, without order.
pub(crate) fn difference(before: &NodeState, after: &NodeState) -> BTreeSet<String> {
    let mut deltas = Vec::new();
    deltas.extend(after.node.clone().filter(|node| before.node.as_ref() != Some(node)).map(Delta::Node));
    if before.settings != after.settings {
        deltas.push(Delta::Settings(after.settings.clone()));
    }
    for (id, (kind, members)) in &after.sets {
        match before.sets.get(id) {
            None => deltas.push(Delta::SetCreated(id.clone(), *kind, members.clone())),
            Some((_, old)) if old == members => {}
            Some((_, old)) => deltas.push(Delta::SetChanged {
                id: id.clone(),
                added: members.difference(old).copied().collect(),
                removed: old.difference(members).copied().collect(),
            }),
        }
    }
    changed(&before.policies, &after.policies, |id, rules| deltas.push(Delta::Policy(id, rules)));
    changed(&before.endpoints, &after.endpoints, |id, endpoint| deltas.push(Delta::Endpoint(id, endpoint)));
    changed(&before.host_endpoints, &after.host_endpoints, |name, endpoint| {
        deltas.push(Delta::HostEndpoint(name, endpoint));
    });
    changed(&before.vteps, &after.vteps, |_, vtep| deltas.push(Delta::Vtep(vtep)));
    changed(&before.routes, &after.routes, |destination, target| {
        deltas.push(Delta::Route(tortie_dataplane::Route { destination, target }));
    });
    changed(&before.services, &after.services, |id, service| deltas.push(Delta::Service(id, service)));
    deltas.extend(gone(&before.services, &after.services).map(Delta::ServiceRemoved));
    deltas.extend(gone(&before.sets, &after.sets).map(Delta::SetRemoved));
    deltas.extend(gone(&before.policies, &after.policies).map(Delta::PolicyRemoved));
    deltas.extend(gone(&before.endpoints, &after.endpoints).map(Delta::EndpointRemoved));
    deltas.extend(gone(&before.host_endpoints, &after.host_endpoints).map(Delta::HostEndpointRemoved));
    deltas.extend(gone(&before.vteps, &after.vteps).map(|(node, version)| Delta::VtepRemoved(node, version)));
    deltas.extend(gone(&before.routes, &after.routes).map(Delta::RouteRemoved));
    shown(&deltas)
}

/// Deltas as texts, without order; panics on a duplicate.
pub(crate) fn shown(deltas: &[Delta]) -> BTreeSet<String> {
    let mut shown = BTreeSet::new();
    for delta in deltas {
        assert!(shown.insert(format!("{delta:?}")), "said twice: {delta:?}");
    }
    shown
}

fn changed<K: Ord + Clone, V: Clone + PartialEq>(
    before: &BTreeMap<K, V>,
    after: &BTreeMap<K, V>,
    mut say: impl FnMut(K, V),
) {
    for (key, value) in after.iter().filter(|(key, value)| before.get(*key) != Some(*value)) {
        say(key.clone(), value.clone());
    }
}

fn gone<K: Ord + Clone, V>(before: &BTreeMap<K, V>, after: &BTreeMap<K, V>) -> impl Iterator<Item = K> {
    before.keys().filter(|key| !after.contains_key(*key)).cloned()
}

/// Sets, then policies, then endpoints, then removals in the opposite order (policy decision 23).
pub(crate) fn assert_order(deltas: &[Delta]) {
    let place = |delta: &Delta| match delta {
        Delta::SetCreated(..) | Delta::SetChanged { .. } => Some(0),
        Delta::Policy(..) => Some(1),
        Delta::Endpoint(..) | Delta::EndpointRemoved(_) => Some(2),
        Delta::HostEndpoint(..) | Delta::HostEndpointRemoved(_) => Some(2),
        Delta::PolicyRemoved(_) => Some(3),
        Delta::SetRemoved(_) => Some(4),
        _ => None,
    };
    assert!(deltas.iter().filter_map(place).is_sorted(), "{deltas:?}");
}
