//! Compiles Calico's policies (upstream: `updateprocessors` and `felix/calc/rule_scanner.go` of Calico).

use std::collections::BTreeMap;
use std::sync::Arc;

use tortie_api::calico::{EntityRule, Icmp, PolicySpec, PolicyType, Rule as CalicoRule, ServiceMatch};
use tortie_api::net::{IpVersion, PortRange, Protocol};
use tortie_api::{Cidr, Port, ProtocolName};
use tortie_selector::{NAMESPACE_LABEL, Selector};

use crate::compiled::{Compiled, Hook, Order, SetSource};
use crate::labels::{NAMESPACE_PREFIX, SERVICE_ACCOUNT_LABEL, SERVICE_ACCOUNT_PREFIX, of_namespace};
use crate::program::{EntityMatch, IcmpMatch, PolicyId, PolicyRules, Rule, SetId};

pub(crate) type Sets = BTreeMap<SetId, SetSource>;

/// Compiles a validated policy.
pub(crate) fn compile(id: PolicyId, spec: &PolicySpec) -> Compiled {
    let types = spec.effective_types();
    let mut sets = Sets::new();
    let mut rules = |of: PolicyType, rules: &[CalicoRule]| match types.contains(&of) {
        true => compile_rules(&id.namespace, rules, &mut sets),
        false => Vec::new(),
    };
    let ingress = rules(PolicyType::Ingress, &spec.ingress);
    let egress = rules(PolicyType::Egress, &spec.egress);
    let with_http = spec.ingress.iter().enumerate().filter(|(_, rule)| rule.http.is_some());
    let left_out = with_http.map(|(index, _)| {
        format!("spec.ingress[{index}].http: nothing looks into packets yet, so the rule allows nothing")
    });
    Compiled {
        tier: spec.tier_name().to_owned(),
        order: Order::new(spec.order, &id),
        hook: hook(spec),
        selector: selected(
            &id,
            spec.selector.as_ref(),
            spec.namespace_selector.as_ref(),
            spec.service_account_selector.as_ref(),
        ),
        ingress: types.contains(&PolicyType::Ingress),
        egress: types.contains(&PolicyType::Egress),
        rules: Arc::new(PolicyRules { ingress, egress }),
        left_out: left_out.collect(),
        sets,
        not_understood: None,
        id,
    }
}

fn hook(spec: &PolicySpec) -> Hook {
    match (spec.do_not_track, spec.pre_dnat, spec.apply_on_forward) {
        (true, ..) => Hook::Untracked,
        (_, true, _) => Hook::PreDnat,
        (.., true) => Hook::AlsoForwarded,
        _ => Hook::Normal,
    }
}

/// The endpoints to which a policy applies.
pub(crate) fn selected(
    id: &PolicyId,
    selector: Option<&Selector>,
    namespaces: Option<&Selector>,
    service_accounts: Option<&Selector>,
) -> Selector {
    let mut terms = Vec::new();
    if id.namespace.is_empty() {
        match namespaces {
            Some(namespaces) => {
                terms.extend(selector.map(|selector| selector.all_means_has(NAMESPACE_LABEL)));
                terms.push(of_namespaces(namespaces));
            }
            None => terms.extend(selector.cloned()),
        }
    } else {
        terms.extend(selector.cloned());
        terms.push(of_namespace(&id.namespace));
    }
    // Calico rewrites every `all()` of the combined selector, so that it does not select endpoints without a service
    // account (`globalnetworkpolicyprocessor.go`).
    if let Some(service_accounts) = service_accounts {
        terms.push(service_accounts.prefixed(SERVICE_ACCOUNT_PREFIX));
        return Selector::all_of(terms).all_means_has(SERVICE_ACCOUNT_LABEL);
    }
    Selector::all_of(terms)
}

/// Converts a selector of namespaces to a selector of endpoints; `global()` selects endpoints without a namespace.
pub(crate) fn of_namespaces(namespaces: &Selector) -> Selector {
    if namespaces.is_global() {
        return Selector::has(NAMESPACE_LABEL).negated();
    }
    namespaces.over_prefixed(NAMESPACE_PREFIX, NAMESPACE_LABEL)
}

/// Compiles validated rules. An Allow with an `http` criterion matches nothing (policy decision 15) and is left out.
pub(crate) fn compile_rules(namespace: &Arc<str>, rules: &[CalicoRule], sets: &mut Sets) -> Vec<Rule> {
    let enforced = rules.iter().filter(|rule| rule.http.is_none());
    enforced.filter_map(|rule| compile_rule(namespace, rule, sets)).collect()
}

/// Compiles one rule; `None` if no packet can match it.
fn compile_rule(namespace: &Arc<str>, rule: &CalicoRule, sets: &mut Sets) -> Option<Rule> {
    let families = families(rule);
    let ip_version = match families.as_slice() {
        [] => return None,
        [version] => Some(*version),
        _ => None,
    };
    // Exhaustive, so that a new field does not compile until it is compiled. `families` reads `ipVersion`, and rules
    // with `http` do not get here.
    let CalicoRule {
        action,
        ip_version: _,
        protocol,
        not_protocol,
        icmp,
        not_icmp,
        source,
        destination,
        http: _,
        metadata: _,
    } = rule;
    let message = |icmp: &Icmp| IcmpMatch { icmp_type: icmp.icmp_type, icmp_code: icmp.code };
    let protocol = protocol.map(|ProtocolName(protocol)| protocol);
    Some(Rule {
        action: *action,
        ip_version,
        protocol,
        not_protocol: not_protocol.map(|ProtocolName(protocol)| protocol),
        icmp: icmp.as_ref().map(message),
        not_icmp: not_icmp.as_ref().map(message),
        source: compile_entity(namespace, source, protocol, false, sets),
        destination: compile_entity(namespace, destination, protocol, true, sets),
    })
}

/// The address families that a rule concerns: that of its `ipVersion`, and those for which every list of networks has
/// an entry (`felix/rules/policy.go`, `FilterRuleToIPVersion`). So a rule with `notNets: [fd00::/8]` does not match
/// IPv4 packets.
fn families(rule: &CalicoRule) -> Vec<IpVersion> {
    let sides = [&rule.source, &rule.destination];
    let lists = sides.map(|side| [&side.nets, &side.not_nets]);
    let concerns = |version: &IpVersion| {
        let (number, is_v4) = if *version == IpVersion::V4 { (4, true) } else { (6, false) };
        let has_some =
            |nets: &&Vec<Cidr>| nets.is_empty() || nets.iter().any(|Cidr(net)| net.addr().is_ipv4() == is_v4);
        rule.ip_version.is_none_or(|wanted| wanted == number) && lists.iter().flatten().all(has_some)
    };
    [IpVersion::V4, IpVersion::V6].into_iter().filter(concerns).collect()
}

fn compile_entity(
    namespace: &Arc<str>,
    entity: &EntityRule,
    protocol: Option<Protocol>,
    is_destination: bool,
    sets: &mut Sets,
) -> EntityMatch {
    // Exhaustive, so that a new field does not compile until it is compiled. `endpoints_of` reads the selectors.
    let EntityRule {
        nets,
        not_nets,
        selector: _,
        not_selector: _,
        namespace_selector: _,
        services,
        ports,
        not_ports,
        service_accounts: _,
    } = entity;
    if let Some(service) = services {
        // Ports beside a Service belong to the source: numbers, or names that any endpoint declares.
        let mut ports_of = |ports: &[Port]| {
            names(ports).map(|name| port_set(&Selector::all(), protocol, name, sets)).collect()
        };
        let (port_sets, not_port_sets): (Vec<SetId>, _) = (ports_of(ports), ports_of(not_ports));
        let backends = backends(namespace, service, is_destination, sets);
        return EntityMatch {
            ports: numbers(ports),
            port_sets: [backends.port_sets, port_sets].concat(),
            not_ports: numbers(not_ports),
            not_port_sets,
            ..backends
        };
    }
    let (meant, not_meant) = endpoints_of(namespace, entity);
    // A named port means the ports of that name on the endpoints that this side selects, or on all endpoints if it
    // selects none.
    let declaring = meant.clone().unwrap_or_else(Selector::all);
    let mut named_ports =
        |ports: &[Port]| names(ports).map(|name| port_set(&declaring, protocol, name, sets)).collect();
    let (port_sets, not_port_sets) = (named_ports(ports), named_ports(not_ports));
    let networks = |nets: &[Cidr]| nets.iter().map(|Cidr(net)| *net).collect();
    EntityMatch {
        nets: networks(nets),
        not_nets: networks(not_nets),
        sets: meant.into_iter().map(|selector| named(selector, sets)).collect(),
        not_sets: not_meant.into_iter().map(|selector| named(selector, sets)).collect(),
        ports: numbers(ports),
        port_sets,
        not_ports: numbers(not_ports),
        not_port_sets,
    }
}

/// The backends of a Service: as a destination with their ports, as a source by address alone
/// (`felix/calc/rule_scanner.go`).
fn backends(namespace: &Arc<str>, service: &ServiceMatch, with_ports: bool, sets: &mut Sets) -> EntityMatch {
    let namespace = service.namespace.as_deref().unwrap_or(&**namespace);
    let (prefix, name) = (if with_ports { "svc" } else { "svcnoport" }, &service.name);
    let id = SetId::new(tortie_selector::unique_id(prefix, &format!("{namespace}/{name}")));
    let source = SetSource::Service { namespace: namespace.to_owned(), name: name.clone(), with_ports };
    sets.insert(id.clone(), source);
    match with_ports {
        true => EntityMatch { port_sets: vec![id], ..EntityMatch::default() },
        false => EntityMatch { sets: vec![id], ..EntityMatch::default() },
    }
}

/// The endpoints that one side of a rule selects, and those that it excludes. If there is any positive criterion,
/// both become one selector. So only a `notSelector` alone stays a negation.
fn endpoints_of(namespace: &Arc<str>, entity: &EntityRule) -> (Option<Selector>, Option<Selector>) {
    let accounts = entity.service_accounts.as_ref();
    let selects = entity.selector.is_some()
        || entity.not_selector.is_some()
        || entity.namespace_selector.is_some()
        || accounts.is_some();
    if !selects {
        return (None, None);
    }
    let mut terms = Vec::new();
    match &entity.namespace_selector {
        Some(namespaces) => terms.push(of_namespaces(namespaces)),
        None if !namespace.is_empty() => terms.push(of_namespace(namespace)),
        None => {}
    }
    if let Some(accounts) = accounts {
        if !accounts.names.is_empty() {
            terms.push(Selector::one_of(SERVICE_ACCOUNT_LABEL, accounts.names.iter().cloned()));
        }
        // Here `all()` keeps its meaning: it matches network sets, too (`rules.go`, `parseServiceAccounts`).
        terms.extend(accounts.selector.as_ref().map(|selector| selector.prefixed(SERVICE_ACCOUNT_PREFIX)));
    }
    terms.extend(entity.selector.clone());
    match (terms.is_empty(), entity.not_selector.clone()) {
        (true, not) => (None, not),
        (false, not) => {
            terms.extend(not.map(Selector::negated));
            (Some(Selector::all_of(terms)), None)
        }
    }
}

/// Adds the set of a selector to `sets` and returns its id.
pub(crate) fn named(selector: Selector, sets: &mut Sets) -> SetId {
    let id = SetId::new(selector.id());
    sets.insert(id.clone(), SetSource::Selector(selector));
    id
}

/// Adds the set of all ports with this name to `sets` and returns its id. The id is Calico's except for the hash
/// (`libcalico-go/lib/selector`).
pub(crate) fn port_set(
    selector: &Selector,
    protocol: Option<Protocol>,
    name: &str,
    sets: &mut Sets,
) -> SetId {
    let shown = protocol.map(|protocol| protocol.to_string()).unwrap_or_default();
    let id = SetId::new(tortie_selector::unique_id("n", &format!("{},{shown},{name}", selector.id())));
    sets.insert(
        id.clone(),
        SetSource::NamedPort { selector: selector.clone(), protocol, name: name.to_owned() },
    );
    id
}

fn names(ports: &[Port]) -> impl Iterator<Item = &str> {
    ports.iter().filter_map(|port| match port {
        Port::Named(name) => Some(name.as_str()),
        Port::Range(_) => None,
    })
}

fn numbers(ports: &[Port]) -> Vec<PortRange> {
    let number = |port: &Port| match port {
        Port::Range(range) => Some(*range),
        Port::Named(_) => None,
    };
    ports.iter().filter_map(number).collect()
}
