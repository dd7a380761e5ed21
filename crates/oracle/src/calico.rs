//! Rules of Calico's policies (policy decisions 12–14).

use tortie_api::calico::{EntityRule, Icmp, PolicySpec, Rule};
use tortie_api::net::Direction;
use tortie_api::{Cidr, Port, ProtocolName};
use tortie_selector::Selector;

use super::packet::{Packet, PacketEnd, shown};
use super::trace::Mismatch;
use super::world::Identity;

type Outcome = Result<(), Mismatch>;

/// The rules of one direction.
pub(super) fn rules(spec: &PolicySpec, direction: Direction) -> &[Rule] {
    match direction {
        Direction::Ingress => &spec.ingress,
        Direction::Egress => &spec.egress,
    }
}

/// Whether every criterion of the rule matches; `namespace` is the policy's.
pub(super) fn matches(namespace: &str, rule: &Rule, packet: &Packet<'_>) -> Outcome {
    // Exhaustive, here and below, because a forgotten criterion would open something.
    let Rule {
        action: _,
        ip_version,
        protocol: wanted_protocol,
        not_protocol,
        icmp,
        not_icmp,
        source,
        destination,
        http,
        metadata: _,
    } = rule;
    let version = if packet.destination.address.is_ipv4() { 4 } else { 6 };
    let protocol = packet.protocol;
    if let Some(wanted) = ip_version.filter(|wanted| *wanted != version) {
        return Err(Mismatch::new("ipVersion", wanted, format!("the packet is IPv{version}")));
    }
    if let Some(ProtocolName(wanted)) = wanted_protocol.filter(|wanted| wanted.0 != protocol) {
        return Err(Mismatch::new("protocol", wanted, format!("the packet is {protocol}")));
    }
    if not_protocol.is_some_and(|unwanted| unwanted.0 == protocol) {
        let wanted = format!("anything but {protocol}");
        return Err(Mismatch::new("notProtocol", wanted, format!("the packet is {protocol}")));
    }
    if let Some(wanted) = icmp.as_ref().filter(|wanted| !is_icmp(wanted, packet)) {
        return Err(Mismatch::new("icmp", shown_icmp(wanted), found_icmp(packet)));
    }
    if let Some(unwanted) = not_icmp.as_ref().filter(|unwanted| is_icmp(unwanted, packet)) {
        let wanted = format!("anything but {}", shown_icmp(unwanted));
        return Err(Mismatch::new("notICMP", wanted, found_icmp(packet)));
    }
    for (name, side) in [("source", source), ("destination", destination)] {
        if let Some(mismatch) = of_other_family(name, side, version) {
            return Err(mismatch);
        }
    }
    entity(namespace, "source", source, &packet.source, packet)?;
    entity(namespace, "destination", destination, &packet.destination, packet)?;
    match http {
        // HTTP requests are not inspected yet, so none is allowed (policy decision 15).
        Some(_) => Err(Mismatch::new("http", "a request that is looked into", "which is not done yet")),
        None => Ok(()),
    }
}

/// Whether a selector of namespaces matches the subject's namespace. `global()` matches subjects without a namespace,
/// every other selector only subjects with one.
pub(super) fn of_namespace(selector: &Selector, subject: &Identity) -> bool {
    if selector.is_global() {
        return subject.namespace.is_empty();
    }
    // `all()` becomes `has(…)` of a label that only subjects with a namespace have, so that it also matches if that
    // namespace is unknown.
    let mut labels = subject.namespace_labels.clone();
    if !subject.namespace.is_empty() {
        labels.insert("there is one".into(), String::new());
    }
    selector.all_means_has("there is one").matches(&labels)
}

/// Whether a policy's selector of service accounts matches the pod's; `all()` matches pods that have one.
pub(super) fn of_account(selector: &Selector, pod: &Identity) -> bool {
    if pod.account.is_empty() {
        return selector.all_means_has("no such label").matches(&pod.account_labels);
    }
    selector.matches(&pod.account_labels)
}

/// The first list of networks of one side without a network of the packet's family: the rule does not concern the
/// packet.
fn of_other_family(name: &str, rule: &EntityRule, version: u8) -> Option<Mismatch> {
    let lists = [("nets", &rule.nets), ("notNets", &rule.not_nets)];
    let of_other = |(_, nets): &&(&str, &Vec<Cidr>)| {
        !nets.is_empty() && nets.iter().all(|Cidr(net)| net.addr().is_ipv4() != (version == 4))
    };
    let (field, nets) = lists.iter().find(of_other)?;
    let nets: Vec<String> = nets.iter().map(|Cidr(net)| net.to_string()).collect();
    let wanted = format!("a packet of the family of {}", nets.join(", "));
    Some(Mismatch::new(format!("{name}.{field}"), wanted, format!("the packet is IPv{version}")))
}

fn is_icmp(wanted: &Icmp, packet: &Packet<'_>) -> bool {
    let Some((icmp_type, code)) = packet.icmp else { return false };
    wanted.icmp_type.is_none_or(|wanted| wanted == icmp_type)
        && wanted.code.is_none_or(|wanted| wanted == code)
}

fn shown_icmp(icmp: &Icmp) -> String {
    match (icmp.icmp_type, icmp.code) {
        (Some(icmp_type), Some(code)) => format!("type {icmp_type} code {code}"),
        (Some(icmp_type), None) => format!("type {icmp_type}"),
        (None, _) => "any type".to_owned(),
    }
}

fn found_icmp(packet: &Packet<'_>) -> String {
    match packet.icmp {
        Some((icmp_type, code)) => format!("the packet is type {icmp_type} code {code}"),
        None => format!("the packet is {}", packet.protocol),
    }
}

/// Whether every criterion of one side matches (policy decision 14).
fn entity(
    namespace: &str,
    name: &str,
    rule: &EntityRule,
    side: &PacketEnd<'_>,
    packet: &Packet<'_>,
) -> Outcome {
    let field = |field: &str| format!("{name}.{field}");
    let address = side.address;
    // `meant` reads the selectors, and `ports` the ports.
    let EntityRule {
        nets,
        not_nets,
        selector: _,
        not_selector: _,
        namespace_selector: _,
        services,
        ports: _,
        not_ports: _,
        service_accounts: _,
    } = rule;
    let holds = |nets: &[Cidr]| nets.iter().find(|Cidr(net)| net.contains(&address)).copied();
    if !nets.is_empty() && holds(nets).is_none() {
        let nets: Vec<String> = nets.iter().map(|Cidr(net)| net.to_string()).collect();
        return Err(Mismatch::new(field("nets"), nets.join(", "), address));
    }
    if let Some(Cidr(net)) = holds(not_nets) {
        return Err(Mismatch::new(field("notNets"), format!("an address outside {net}"), address));
    }
    if let Some(service) = services {
        let namespace = service.namespace.as_deref().unwrap_or(namespace);
        // For the destination, the backend's port counts, too.
        if !packet.is_backend(side, namespace, &service.name, name == "destination") {
            let wanted = format!("a backend of Service {namespace}/{}", service.name);
            return Err(Mismatch::new(field("services"), wanted, side.described()));
        }
    }
    let meant = meant(namespace, name, rule, side)?;
    ports(name, rule, &meant, side, packet)
}

/// The pods and network sets at this side that the rule selects; all that are there, if it has no such criterion.
fn meant<'a>(
    namespace: &str,
    name: &str,
    rule: &EntityRule,
    side: &PacketEnd<'a>,
) -> Result<Vec<&'a Identity>, Mismatch> {
    let positive =
        rule.selector.is_some() || rule.namespace_selector.is_some() || rule.service_accounts.is_some();
    let unwanted = rule.not_selector.as_ref();
    if !positive && unwanted.is_none() {
        return Ok(side.present.clone());
    }
    // A `notSelector` alone in a cluster-wide policy also matches addresses outside of the cluster.
    if !positive && namespace.is_empty() {
        let excluded = side.present.iter().find_map(|pod| not_excluded(name, unwanted, pod).err());
        return excluded.map_or_else(|| Ok(side.present.clone()), Err);
    }
    let mut first = None;
    let mut meant = Vec::new();
    for pod in &side.present {
        match is_meant(namespace, name, rule, pod) {
            Ok(()) => meant.push(*pod),
            Err(mismatch) => first = first.or(Some(mismatch)),
        }
    }
    if !meant.is_empty() {
        return Ok(meant);
    }
    Err(first.unwrap_or_else(|| {
        let (field, wanted) = match (&rule.selector, &rule.namespace_selector) {
            (Some(selector), _) => ("selector", selector.to_string()),
            (None, Some(selector)) => ("namespaceSelector", selector.to_string()),
            (None, None) if rule.service_accounts.is_some() => ("serviceAccounts", "a pod".to_owned()),
            (None, None) => ("notSelector", format!("a pod of namespace {namespace}")),
        };
        Mismatch::new(format!("{name}.{field}"), wanted, side.described())
    }))
}

/// Whether one pod matches all criteria for pods of this side (policy decision 13).
fn is_meant(namespace: &str, name: &str, rule: &EntityRule, pod: &Identity) -> Outcome {
    let field = |field: &str| format!("{name}.{field}");
    let labels = |labels| format!("{pod} has {}", shown(labels));
    match &rule.namespace_selector {
        Some(selector) if !of_namespace(selector, pod) => {
            let found = pod.described_namespace();
            return Err(Mismatch::new(field("namespaceSelector"), selector, found));
        }
        None if !namespace.is_empty() && pod.namespace != namespace => {
            let wanted = format!("a pod of namespace {namespace}, which is the policy's");
            let found = format!("{pod} is in namespace {}", pod.namespace);
            return Err(Mismatch::new(field("namespaceSelector"), wanted, found));
        }
        _ => {}
    }
    if let Some(accounts) = &rule.service_accounts {
        if !accounts.names.is_empty() && !accounts.names.contains(&pod.account) {
            let found = format!("{pod} has {:?}", pod.account);
            return Err(Mismatch::new(field("serviceAccounts.names"), accounts.names.join(", "), found));
        }
        if let Some(selector) = accounts.selector.as_ref().filter(|each| !each.matches(&pod.account_labels)) {
            let found = format!("service account {} has {}", pod.account, shown(&pod.account_labels));
            return Err(Mismatch::new(field("serviceAccounts.selector"), selector, found));
        }
    }
    if let Some(selector) = rule.selector.as_ref().filter(|selector| !selector.matches(&pod.labels)) {
        return Err(Mismatch::new(field("selector"), selector, labels(&pod.own_labels)));
    }
    not_excluded(name, rule.not_selector.as_ref(), pod)
}

fn not_excluded(name: &str, unwanted: Option<&Selector>, pod: &Identity) -> Outcome {
    match unwanted.filter(|selector| selector.matches(&pod.labels)) {
        Some(selector) => Err(Mismatch::new(
            format!("{name}.notSelector"),
            format!("no pod with {selector}"),
            format!("{pod} has {}", shown(&pod.own_labels)),
        )),
        None => Ok(()),
    }
}

/// Numbers and names are alternatives; a name matches a port that a selected pod declares (policy decision 12).
fn ports(
    name: &str,
    rule: &EntityRule,
    meant: &[&Identity],
    side: &PacketEnd<'_>,
    packet: &Packet<'_>,
) -> Outcome {
    let is = |port: &&Port| match port {
        Port::Range(range) => packet.protocol.has_ports() && range.contains(side.port),
        Port::Named(name) => meant.iter().any(|pod| packet.is_named(side, pod, name)),
    };
    if !rule.ports.is_empty() && !rule.ports.iter().any(|port| is(&port)) {
        let wanted: Vec<String> = rule.ports.iter().map(shown_port).collect();
        return Err(Mismatch::new(format!("{name}.ports"), wanted.join(", "), packet.shown_port(side)));
    }
    if let Some(unwanted) = rule.not_ports.iter().find(is) {
        let wanted = format!("anything but {}", shown_port(unwanted));
        return Err(Mismatch::new(format!("{name}.notPorts"), wanted, packet.shown_port(side)));
    }
    Ok(())
}

fn shown_port(port: &Port) -> String {
    match port {
        Port::Range(range) => range.to_string(),
        Port::Named(name) => name.clone(),
    }
}
