//! The destinations of a packet to a Service, judged from the objects alone: Services, EndpointSlices, the own Node and ServiceCIDRs.
//!
//! It is naive on purpose: it reads all objects again for each packet, and shares no code with the crate `services`, not even
//! the parsing of objects. The rules are those of kube-proxy 1.36 in nftables mode. Where kube-proxy leaves a case open (two
//! Services with one address and port, two entries of one endpoint), the rule is that of the crate's documentation.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::Value;

mod objects;

use objects::{family_of, ip, items, net, text};

/// The objects and settings by which a node judges packets to Services.
#[derive(Debug, Clone, Copy)]
pub struct ServiceCluster<'a> {
    /// The name of the node.
    pub node: &'a str,
    /// The objects, each with its `kind`.
    pub objects: &'a [Value],
    /// The networks whose addresses accept node ports; absent for the node's first address of each family.
    pub node_port_addresses: Option<&'a [IpNet]>,
    /// Packets to clusterIPs always get the node's address as their source.
    pub masquerade_all: bool,
    /// The node can tell pods from others.
    pub knows_pods: bool,
}

/// A packet that begins a connection.
#[derive(Debug, Clone)]
pub struct ServicePacket {
    /// Its source.
    pub source: IpAddr,
    /// Its sender.
    pub sender: ServiceClient,
    /// Its destination.
    pub destination: IpAddr,
    /// True if that is an address of the node.
    pub is_to_node: bool,
    /// `TCP`, `UDP`, `SCTP`, or any other name.
    pub protocol: &'static str,
    /// Its destination port; 0 if the protocol has none.
    pub port: u16,
}

/// The sender of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServiceClient {
    /// A pod.
    Pod,
    /// The node itself.
    Node,
    /// Anything else.
    Other,
}

/// An earlier connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Visit {
    /// Its client.
    pub client: IpAddr,
    /// The port of the Service that it went to, as in [`ServiceJudgement::service_port`].
    pub service_port: String,
    /// The backend that it got.
    pub backend: (IpAddr, u16),
    /// The time in seconds.
    pub at: u64,
}

/// A judgement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceJudgement {
    /// The possible destinations.
    pub outcome: ServiceOutcome,
    /// The port of a Service that took the packet: its family, namespace, name, port name and protocol.
    pub service_port: Option<String>,
    /// The rules that were decisive, in words.
    pub rules: Vec<&'static str>,
}

/// The possible destinations of a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServiceOutcome {
    /// No Service takes it.
    Untouched,
    /// One of these backends, and whether the node's address becomes the source.
    Backends(BTreeSet<(IpAddr, u16, bool)>),
    /// It is dropped.
    Dropped,
    /// It is rejected.
    Rejected,
}

/// The rules that a judgement may name.
pub const SERVICE_RULES: [&str; 28] = [
    "clusterIP",
    "load balancer",
    "externalIP",
    "node port",
    "ITP Cluster, pod",
    "ITP Cluster, node",
    "ITP Cluster, other",
    "ITP Local",
    "ITP Local, no backend here",
    "ETP Cluster, pod",
    "ETP Cluster, node",
    "ETP Cluster, other",
    "ETP Local, pod",
    "ETP Local, node",
    "ETP Local, other",
    "ETP Local, no backend here",
    "no endpoint",
    "clusterIP, other port",
    "unused clusterIP",
    "address of the node in a ServiceCIDR",
    "not of a Service",
    "outside of source ranges",
    "to itself",
    "remembered",
    "hints of nodes",
    "hints of zones",
    "serves while it ends",
    "two claims",
];

/// A claim to the packet.
struct Claimed<'a> {
    service: &'a Value,
    port: &'a Value,
    kind: &'static str,
}

/// Judges a packet at a time in seconds, after some visits.
#[must_use]
pub fn judge_service(
    cluster: &ServiceCluster<'_>,
    packet: &ServicePacket,
    visits: &[Visit],
    now: u64,
) -> ServiceJudgement {
    let mut rules = Vec::new();
    let Some(claimed) = first_claim(cluster, packet, &mut rules) else {
        let outcome = unclaimed(cluster, packet, &mut rules);
        return ServiceJudgement { outcome, service_port: None, rules };
    };
    rules.push(claimed.kind);
    let name = [
        family_of(packet.destination),
        text(&claimed.service["metadata"]["namespace"]),
        text(&claimed.service["metadata"]["name"]),
        text(&claimed.port["name"]),
        packet.protocol,
    ];
    let service_port = name.join(" ");
    let outcome = claimed_outcome(cluster, packet, &claimed, &service_port, (visits, now), &mut rules);
    ServiceJudgement { outcome, service_port: Some(service_port), rules }
}

/// The port of the health check of a Service for a family (`IPv4` or `IPv6`), and the number of addresses of its ready endpoints on the node. None
/// if it has no such check.
#[must_use]
pub fn service_health(cluster: &ServiceCluster<'_>, service: &Value, family: &str) -> Option<(u16, usize)> {
    let spec = &service["spec"];
    let is_translated = translated(cluster, family).iter().any(|(one, _)| *one == service);
    let has_check = spec["type"] == "LoadBalancer" && spec["externalTrafficPolicy"] == "Local";
    let port = u16::try_from(spec["healthCheckNodePort"].as_u64()?).ok()?;
    let all = items(&spec["ports"]).flat_map(|port| endpoints(cluster, service, port, family));
    let here: BTreeSet<IpAddr> =
        all.filter(|seen| seen.is_here && seen.ready).map(|seen| seen.at.0).collect();
    (is_translated && has_check && port > 0).then_some((port, here.len()))
}

/// The Services that this kind of proxy translates at all, with an address of this family.
fn translated<'a>(cluster: &ServiceCluster<'a>, family: &str) -> Vec<(&'a Value, IpAddr)> {
    let mut found = Vec::new();
    for service in cluster.objects.iter().filter(|object| object["kind"] == "Service") {
        let (spec, labels) = (&service["spec"], &service["metadata"]["labels"]);
        let hidden = !labels["service.kubernetes.io/service-proxy-name"].is_null();
        let mut own: Vec<&str> = items(&spec["clusterIPs"]).map(text).collect();
        if own.is_empty() {
            own.push(text(&spec["clusterIP"]));
        }
        if hidden || spec["type"] == "ExternalName" || ["", "None"].contains(&text(&spec["clusterIP"])) {
            continue;
        }
        let first = own.into_iter().filter_map(ip).find(|address| family_of(*address) == family);
        found.extend(first.map(|address| (service, address)));
    }
    found
}

/// The claim that wins: addresses before node ports; at one address clusterIPs, then load balancers, then externalIPs; then the
/// older Service, then the first by name.
fn first_claim<'a>(
    cluster: &ServiceCluster<'a>,
    packet: &ServicePacket,
    rules: &mut Vec<&'static str>,
) -> Option<Claimed<'a>> {
    let family = family_of(packet.destination);
    let mut claims = BTreeMap::new();
    for (service, cluster_ip) in translated(cluster, family) {
        let kinds: Vec<(&'static str, Vec<IpAddr>)> = vec![
            ("clusterIP", vec![cluster_ip]),
            ("load balancer", balancer_ips(service, family)),
            ("externalIP", external_ips(service, family)),
        ];
        for port in items(&service["spec"]["ports"]) {
            if port["protocol"].as_str().unwrap_or("TCP") != packet.protocol {
                continue;
            }
            for (rank, (kind, addresses)) in kinds.iter().enumerate() {
                if port["port"] == packet.port && addresses.contains(&packet.destination) {
                    claims.insert(claim_order(rank, service), Claimed { service, port, kind });
                }
            }
            let number = port["nodePort"].as_u64().unwrap_or(0);
            if number > 0 && number == u64::from(packet.port) && accepts_node_ports(cluster, packet) {
                claims.insert(claim_order(3, service), Claimed { service, port, kind: "node port" });
            }
        }
    }
    let mut of_addresses = claims.values().filter(|claim| claim.kind != "node port");
    if let (Some(one), Some(two)) = (of_addresses.next(), of_addresses.next())
        && one.service != two.service
    {
        rules.push("two claims");
    }
    claims.into_values().next()
}

fn claim_order(rank: usize, service: &Value) -> (usize, String, String, String) {
    let metadata = &service["metadata"];
    // `~` comes after all digits.
    let created = metadata["creationTimestamp"].as_str().unwrap_or("~");
    (rank, created.to_owned(), text(&metadata["namespace"]).to_owned(), text(&metadata["name"]).to_owned())
}

fn external_ips(service: &Value, family: &str) -> Vec<IpAddr> {
    let all = items(&service["spec"]["externalIPs"]).filter_map(|value| ip(text(value)));
    all.filter(|address| family_of(*address) == family).collect()
}

fn balancer_ips(service: &Value, family: &str) -> Vec<IpAddr> {
    let entries = items(&service["status"]["loadBalancer"]["ingress"]);
    let taken = entries.filter(|entry| ["", "VIP"].contains(&text(&entry["ipMode"])));
    taken.filter_map(|entry| ip(text(&entry["ip"]))).filter(|address| family_of(*address) == family).collect()
}

/// The own Node.
fn own_node<'a>(cluster: &ServiceCluster<'a>) -> Option<&'a Value> {
    let mut nodes = cluster.objects.iter().filter(|object| object["kind"] == "Node");
    nodes.find(|node| node["metadata"]["name"] == cluster.node)
}

fn primary_address(cluster: &ServiceCluster<'_>, family: &str) -> Option<IpAddr> {
    let node = own_node(cluster)?;
    for kind in ["InternalIP", "ExternalIP"] {
        for entry in items(&node["status"]["addresses"]).filter(|entry| entry["type"] == kind) {
            let address = ip(text(&entry["address"]));
            if let Some(address) = address.filter(|address| family_of(*address) == family) {
                return Some(address);
            }
        }
    }
    None
}

fn accepts_node_ports(cluster: &ServiceCluster<'_>, packet: &ServicePacket) -> bool {
    let family = family_of(packet.destination);
    let Some(networks) = cluster.node_port_addresses else {
        return primary_address(cluster, family) == Some(packet.destination);
    };
    let mut own = networks.iter().filter(|network| family_of(network.addr()) == family).peekable();
    let all = own.peek().is_none();
    packet.is_to_node
        && !packet.destination.is_loopback()
        && (all || own.any(|network| network.contains(&packet.destination)))
}

/// The judgement of a packet that no frontend takes.
fn unclaimed(
    cluster: &ServiceCluster<'_>,
    packet: &ServicePacket,
    rules: &mut Vec<&'static str>,
) -> ServiceOutcome {
    let family = family_of(packet.destination);
    if translated(cluster, family).iter().any(|(_, address)| *address == packet.destination) {
        rules.push("clusterIP, other port");
        return ServiceOutcome::Rejected;
    }
    let cidrs = cluster.objects.iter().filter(|object| object["kind"] == "ServiceCIDR");
    let mut networks =
        cidrs.flat_map(|cidr| items(&cidr["spec"]["cidrs"])).filter_map(|cidr| net(text(cidr)));
    let is_unused = networks.any(|network| network.contains(&packet.destination));
    if is_unused && packet.is_to_node {
        rules.push("address of the node in a ServiceCIDR");
        return ServiceOutcome::Untouched;
    }
    if is_unused {
        rules.push("unused clusterIP");
        return ServiceOutcome::Dropped;
    }
    rules.push("not of a Service");
    ServiceOutcome::Untouched
}

/// The judgement of a packet to a frontend.
fn claimed_outcome(
    cluster: &ServiceCluster<'_>,
    packet: &ServicePacket,
    claimed: &Claimed<'_>,
    service_port: &str,
    (visits, now): (&[Visit], u64),
    rules: &mut Vec<&'static str>,
) -> ServiceOutcome {
    if claimed.kind == "load balancer" && !is_in_source_ranges(cluster, claimed.service, packet) {
        rules.push("outside of source ranges");
        return ServiceOutcome::Dropped;
    }
    let endpoints = endpoints(cluster, claimed.service, claimed.port, family_of(packet.destination));
    if !endpoints.iter().any(|endpoint| endpoint.ready || endpoint.serving && endpoint.terminating) {
        rules.push("no endpoint");
        return ServiceOutcome::Rejected;
    }
    let (is_local, masquerade) = row(cluster, packet, claimed, rules);
    let pool =
        if is_local { local_pool(&endpoints, rules) } else { cluster_pool(cluster, &endpoints, rules) };
    if pool.is_empty() {
        // The row of the policy was not reached.
        rules.pop();
        let is_internal = claimed.kind == "clusterIP";
        rules.push(if is_internal { "ITP Local, no backend here" } else { "ETP Local, no backend here" });
        return ServiceOutcome::Dropped;
    }
    let known = remembered(claimed.service, packet, service_port, visits, now);
    let mut chosen: Vec<&Seen> = pool.iter().copied().filter(|seen| known.contains(&seen.at)).collect();
    if chosen.is_empty() {
        chosen = pool;
    } else {
        rules.push("remembered");
    }
    let mut allowed = BTreeSet::new();
    for seen in chosen {
        let is_itself = seen.is_here && seen.at.0 == packet.source;
        if is_itself {
            rules.push("to itself");
        }
        allowed.insert((seen.at.0, seen.at.1, masquerade || is_itself));
    }
    ServiceOutcome::Backends(allowed)
}

/// The row of the table: whether only backends of this node count, and whether the source becomes the node's.
fn row(
    cluster: &ServiceCluster<'_>,
    packet: &ServicePacket,
    claimed: &Claimed<'_>,
    rules: &mut Vec<&'static str>,
) -> (bool, bool) {
    let spec = &claimed.service["spec"];
    let sender = match packet.sender {
        ServiceClient::Pod if !cluster.knows_pods => ServiceClient::Other,
        sender => sender,
    };
    if claimed.kind == "clusterIP" {
        let masquerade = cluster.masquerade_all || cluster.knows_pods && sender != ServiceClient::Pod;
        let is_local = spec["internalTrafficPolicy"] == "Local";
        rules.push(match (is_local, sender) {
            (true, _) => "ITP Local",
            (false, ServiceClient::Pod) => "ITP Cluster, pod",
            (false, ServiceClient::Node) => "ITP Cluster, node",
            (false, ServiceClient::Other) => "ITP Cluster, other",
        });
        return (is_local, masquerade);
    }
    let has_external = ["NodePort", "LoadBalancer"].contains(&text(&spec["type"]))
        || items(&spec["externalIPs"]).next().is_some();
    let is_local = has_external && spec["externalTrafficPolicy"] == "Local";
    let (rule, row) = match (is_local, sender) {
        (false, ServiceClient::Pod) => ("ETP Cluster, pod", (false, true)),
        (false, ServiceClient::Node) => ("ETP Cluster, node", (false, true)),
        (false, ServiceClient::Other) => ("ETP Cluster, other", (false, true)),
        (true, ServiceClient::Pod) => ("ETP Local, pod", (false, false)),
        (true, ServiceClient::Node) => ("ETP Local, node", (false, true)),
        (true, ServiceClient::Other) => ("ETP Local, other", (true, false)),
    };
    rules.push(rule);
    row
}

fn is_in_source_ranges(cluster: &ServiceCluster<'_>, service: &Value, packet: &ServicePacket) -> bool {
    let family = family_of(packet.destination);
    let texts: Vec<&str> = items(&service["spec"]["loadBalancerSourceRanges"]).map(text).collect();
    let own: Vec<IpNet> = texts
        .iter()
        .filter_map(|text| net(text))
        .filter(|network| family_of(network.addr()) == family)
        .collect();
    let none_is_wrong = texts.iter().all(|text| net(text).is_some());
    if own.iter().any(|network| network.prefix_len() == 0) || own.is_empty() && none_is_wrong {
        return true;
    }
    let holds_node = primary_address(cluster, family)
        .is_some_and(|node| own.iter().any(|network| network.contains(&node)));
    own.iter().any(|network| network.contains(&packet.source))
        || holds_node && balancer_ips(service, family).contains(&packet.source)
}

/// An endpoint of the port.
struct Seen {
    at: (IpAddr, u16),
    is_here: bool,
    ready: bool,
    serving: bool,
    terminating: bool,
    zones: Vec<String>,
    nodes: Vec<String>,
}

/// The endpoints of the port: of several entries of one address and port, one that does not end, then one that is ready, then that of the
/// slice with the first name.
fn endpoints(cluster: &ServiceCluster<'_>, service: &Value, port: &Value, family: &str) -> Vec<Seen> {
    let mut entries: Vec<((bool, bool, String, usize), Seen)> = Vec::new();
    for slice in cluster.objects.iter().filter(|object| object["kind"] == "EndpointSlice") {
        let (metadata, of_service) = (&slice["metadata"], &service["metadata"]);
        let labels = &metadata["labels"];
        if metadata["namespace"] != of_service["namespace"]
            || labels["kubernetes.io/service-name"] != of_service["name"]
            || !labels["service.kubernetes.io/headless"].is_null()
            || slice["addressType"] != family
        {
            continue;
        }
        for number in items(&slice["ports"]).filter_map(|of_slice| number_of(of_slice, port)) {
            for (index, endpoint) in items(&slice["endpoints"]).enumerate() {
                let first = items(&endpoint["addresses"]).next().and_then(|address| ip(text(address)));
                let Some(address) = first.filter(|address| family_of(*address) == family) else {
                    continue;
                };
                let seen = seen(endpoint, (address, number), cluster.node);
                let order = (seen.terminating, !seen.ready, text(&metadata["name"]).to_owned(), index);
                entries.push((order, seen));
            }
        }
    }
    entries.sort_by(|one, other| (one.1.at, &one.0).cmp(&(other.1.at, &other.0)));
    entries.dedup_by(|later, earlier| later.1.at == earlier.1.at);
    entries.into_iter().map(|(_, seen)| seen).collect()
}

/// The number of a slice's port, if it belongs to that port of the Service.
fn number_of(port: &Value, of_service: &Value) -> Option<u16> {
    let protocol = |port: &Value| port["protocol"].as_str().unwrap_or("TCP").to_owned();
    let is_of_it =
        port["name"].as_str()? == text(&of_service["name"]) && protocol(port) == protocol(of_service);
    let number = u16::try_from(port["port"].as_u64()?).ok()?;
    (is_of_it && number > 0).then_some(number)
}

fn seen(endpoint: &Value, at: (IpAddr, u16), node: &str) -> Seen {
    let condition = |name: &str, unknown| endpoint["conditions"][name].as_bool().unwrap_or(unknown);
    let names = |field: &str| {
        items(&endpoint["hints"][field]).map(|hint| text(&hint["name"]).to_owned()).collect::<Vec<_>>()
    };
    Seen {
        at,
        is_here: endpoint["nodeName"] == node,
        ready: condition("ready", true),
        serving: condition("serving", true),
        terminating: condition("terminating", false),
        zones: names("forZones"),
        nodes: names("forNodes"),
    }
}

fn local_pool<'a>(endpoints: &'a [Seen], rules: &mut Vec<&'static str>) -> Vec<&'a Seen> {
    let here: Vec<&Seen> = endpoints.iter().filter(|seen| seen.is_here).collect();
    first_usable(here.iter().copied().filter(|seen| seen.ready).collect(), here, rules)
}

fn cluster_pool<'a>(
    cluster: &ServiceCluster<'_>,
    endpoints: &'a [Seen],
    rules: &mut Vec<&'static str>,
) -> Vec<&'a Seen> {
    let ready: Vec<&Seen> = endpoints.iter().filter(|seen| seen.ready).collect();
    let zone =
        own_node(cluster).map_or("", |node| text(&node["metadata"]["labels"]["topology.kubernetes.io/zone"]));
    let by_node: Vec<&Seen> =
        ready.iter().copied().filter(|seen| seen.nodes.iter().any(|node| node == cluster.node)).collect();
    let by_zone: Vec<&Seen> = ready
        .iter()
        .copied()
        .filter(|seen| !zone.is_empty() && seen.zones.iter().any(|named| named == zone))
        .collect();
    if !by_node.is_empty() && ready.iter().all(|seen| !seen.nodes.is_empty()) {
        rules.insert(0, "hints of nodes");
        return by_node;
    }
    if !by_zone.is_empty() && ready.iter().all(|seen| !seen.zones.is_empty()) {
        rules.insert(0, "hints of zones");
        return by_zone;
    }
    first_usable(ready, endpoints.iter().collect(), rules)
}

fn first_usable<'a>(
    ready: Vec<&'a Seen>,
    all: Vec<&'a Seen>,
    rules: &mut Vec<&'static str>,
) -> Vec<&'a Seen> {
    if !ready.is_empty() {
        return ready;
    }
    let ending: Vec<&Seen> = all.into_iter().filter(|seen| seen.serving && seen.terminating).collect();
    if !ending.is_empty() {
        rules.insert(0, "serves while it ends");
    }
    ending
}

/// The backends of the client's visits to the port of the Service within its time.
fn remembered(
    service: &Value,
    packet: &ServicePacket,
    service_port: &str,
    visits: &[Visit],
    now: u64,
) -> Vec<(IpAddr, u16)> {
    let spec = &service["spec"];
    if spec["sessionAffinity"] != "ClientIP" {
        return Vec::new();
    }
    let time = spec["sessionAffinityConfig"]["clientIP"]["timeoutSeconds"].as_u64().unwrap_or(10_800);
    let own =
        visits.iter().filter(|visit| visit.client == packet.source && visit.service_port == service_port);
    own.filter(|visit| now < visit.at + time).map(|visit| visit.backend).collect()
}
