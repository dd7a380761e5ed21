//! What nodes tell each other and others (`confd/templates/bird_ipam.cfg.template` of Calico).

use ipnet::IpNet;
use tortie_api::calico::{BgpConfigurationSpec, BgpFilter, BgpFilterRule};

use super::{BgpNode, Resources, ServiceSettings};
use crate::codec::{AnyCommunity, Family};
use crate::filter::{Action, Conditions, MatchOperator, Operation, Policy, PrefixMatch, Rule};
use crate::rib::PeerRules;

/// The priority of routes that have none of their own.
const NORMAL_PRIORITY: u32 = 1024;

fn rule(about: &str, cidr: IpNet, operator: MatchOperator, action: Action) -> Rule {
    let prefix = Some(PrefixMatch { cidr, operator, lengths: None });
    let conditions = Conditions { prefix, ..Conditions::default() };
    Rule { about: about.into(), conditions, action, operations: Vec::new() }
}

/// Rejects every route.
fn closed(about: &str) -> Policy {
    let reject = Rule {
        about: about.into(),
        conditions: Conditions::default(),
        action: Action::Reject,
        operations: Vec::new(),
    };
    Policy { rules: vec![reject], accepts_others: false }
}

/// What accepts the networks and addresses of Services that other nodes advertise.
const SERVICES: &str = "BGPConfiguration default: a network of Services";

/// The routes that a peer receives if its filters do not decide about them, by the settings of all nodes and of this one.
pub(super) fn export(
    me: &BgpNode<'_>,
    (all, of_node): (&BgpConfigurationSpec, Option<&BgpConfigurationSpec>),
    resources: &Resources<'_>,
    internal: bool,
    family: Family,
) -> Policy {
    use MatchOperator::{Equal, In};
    let mut rules = Vec::new();
    let of_family = |cidr: &IpNet| Family::of(cidr) == family;
    let pools = || resources.pools.iter().filter(|pool| of_family(&pool.spec.cidr));
    rules.extend(pools().filter(|pool| pool.spec.disable_bgp_export).map(|pool| {
        rule(&format!("IPPool {}: disableBGPExport", pool.metadata.name), pool.spec.cidr, In, Action::Reject)
    }));
    let overlays: &[&str] =
        if internal { &["*.calico", "*.cali", "tunl0", "bpf*.cali"] } else { &["bpf*.cali"] };
    rules.extend(overlays.iter().map(|pattern| {
        let conditions = Conditions { interface: Some((*pattern).to_owned()), ..Conditions::default() };
        let about = format!("routes to interfaces {pattern} stay in the cluster").into();
        Rule { about, conditions, action: Action::Reject, operations: Vec::new() }
    }));
    rules.extend(
        communities(me.name, of_node, all)
            .filter(|rule| rule.conditions.prefix.as_ref().is_some_and(|prefix| of_family(&prefix.cidr))),
    );
    for block in resources.blocks.iter().filter(|block| of_family(block)) {
        let about = format!("the block {block} of this node");
        rules.push(rule(&about, *block, Equal, Action::Accept));
        // Single addresses of an own block are part of it.
        rules.push(rule(&about, *block, In, Action::Reject));
    }
    rules.push(own_services());
    if me.cluster_id.is_some() {
        // A reflector passes on what nodes advertise for Services.
        let settings = ServiceSettings::new(all);
        let services = settings.all().copied().filter(of_family);
        rules.extend(services.map(|cidr| rule(SERVICES, cidr, In, Action::Accept)));
    }
    // Also those of a disabled pool, which gives no new addresses, and whose pods go on.
    rules.extend(
        pools()
            .map(|pool| rule(&format!("IPPool {}", pool.metadata.name), pool.spec.cidr, In, Action::Accept)),
    );
    Policy { rules, accepts_others: false }
}

/// The routes that a node of the mesh may announce: those to pods and to Services. Another one would lead packets of all nodes to that node,
/// whose owner may not be trusted with them. A BGPPeer has no such limits, because its BGPFilters say what it may announce.
pub(super) fn import_of_mesh(
    node: &str,
    all: &BgpConfigurationSpec,
    resources: &Resources<'_>,
    family: Family,
) -> Policy {
    use MatchOperator::In;
    let pools = resources
        .pools
        .iter()
        .map(|pool| rule(&format!("IPPool {}", pool.metadata.name), pool.spec.cidr, In, Action::Accept));
    let settings = ServiceSettings::new(all);
    let services = settings.all().map(|cidr| rule(SERVICES, *cidr, In, Action::Accept));
    // Their pods go on without the pool.
    let of_node = resources.stray_blocks.iter().filter(|(_, owner)| owner == node);
    let stray = of_node.map(|(block, _)| {
        rule(&format!("the block {block}, which is in no pool"), *block, In, Action::Accept)
    });
    let of_family = |rule: &Rule| {
        rule.conditions.prefix.as_ref().is_some_and(|prefix| Family::of(&prefix.cidr) == family)
    };
    Policy { rules: pools.chain(services).chain(stray).filter(of_family).collect(), accepts_others: false }
}

/// Accepts what the node advertises for Services: its own routes that are no blocks, about which other rules have decided,
/// and lead to no pod.
fn own_services() -> Rule {
    let conditions = Conditions { only_static: true, ..Conditions::default() };
    Rule {
        about: "Services that this node serves".into(),
        conditions,
        action: Action::Accept,
        operations: Vec::new(),
    }
}

/// The communities of prefixAdvertisements: those of the node, if it has any.
fn communities<'a>(
    node: &str,
    of_node: Option<&'a BgpConfigurationSpec>,
    all: &'a BgpConfigurationSpec,
) -> impl Iterator<Item = Rule> {
    let of_node = of_node.filter(|spec| !spec.prefix_advertisements.is_empty());
    let object = of_node.map_or_else(|| "default".to_owned(), |_| format!("node.{node}"));
    let spec = of_node.unwrap_or(all);
    spec.prefix_advertisements.iter().filter_map(move |advertisement| {
        let value = |name: &String| {
            let known = spec.communities.iter().find(|community| community.name == *name);
            known.map_or(name.as_str(), |community| &community.value).parse::<AnyCommunity>().ok()
        };
        let operations =
            advertisement.communities.iter().filter_map(value).map(Operation::AddCommunity).collect();
        let cidr = advertisement.cidr.parse().ok()?;
        let about = format!("BGPConfiguration {object}: prefixAdvertisements {}", advertisement.cidr);
        Some(Rule { operations, ..rule(&about, cidr, MatchOperator::In, Action::Continue) })
    })
}

/// Puts the rules of BGPFilters before others. If one of them is absent or cannot be read, no route passes.
pub(super) fn add_filters(
    rules: &mut PeerRules,
    family: Family,
    names: &[String],
    filters: &[BgpFilter],
) -> Vec<String> {
    let mut problems = Vec::new();
    let (mut import, mut export) = (Vec::new(), Vec::new());
    for name in names {
        let Some(filter) = filters.iter().find(|filter| filter.metadata.name == *name) else {
            problems.push(format!("there is no BGPFilter {name}, so no route passes"));
            continue;
        };
        let spec = &filter.spec;
        let [import_rules, export_rules] = match family {
            Family::Ipv4 => [("importV4", &spec.import_v4), ("exportV4", &spec.export_v4)],
            Family::Ipv6 => [("importV6", &spec.import_v6), ("exportV6", &spec.export_v6)],
        };
        for ((field, list), to) in [(import_rules, &mut import), (export_rules, &mut export)] {
            for (index, rule) in list.iter().enumerate() {
                match filter_rule(&format!("BGPFilter {name}, {field}[{index}]"), rule) {
                    // A rule that rejects would let pass what Calico rejects.
                    Some(rule) if rule.conditions.interface.is_some() && field.starts_with("import") => problems
                        .push(format!(
                            "{field}[{index}] of BGPFilter {name} has interface, which is unknown for routes of peers, so no route passes; remove it, or match by cidr"
                        )),
                    Some(rule) => to.push(rule),
                    None => problems
                        .push(format!("rule {index} of BGPFilter {name} cannot be read, so no route passes")),
                }
            }
        }
    }
    match problems.first() {
        None => {
            rules.import.rules.splice(0..0, import);
            rules.export.rules.splice(0..0, export);
        }
        Some(problem) => (rules.import, rules.export) = (closed(problem), closed(problem)),
    }
    problems
}

fn filter_rule(about: &str, rule: &BgpFilterRule) -> Option<Rule> {
    let BgpFilterRule {
        cidr,
        match_operator,
        prefix_length,
        source,
        interface,
        peer_type,
        communities,
        as_path_prefix,
        priority,
        action,
        operations,
    } = rule;
    let text = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    let prefix = match (text(cidr), text(match_operator)) {
        (Some(cidr), Some(operator)) => {
            let cidr: IpNet = cidr.parse().ok()?;
            let operator = match operator.as_str() {
                "Equal" => MatchOperator::Equal,
                "NotEqual" => MatchOperator::NotEqual,
                "In" => MatchOperator::In,
                "NotIn" => MatchOperator::NotIn,
                _ => return None,
            };
            let lengths = prefix_length.as_ref().map(|lengths| {
                let longest = Family::of(&cidr).bits();
                (lengths.min.unwrap_or(cidr.prefix_len()), lengths.max.unwrap_or(longest))
            });
            Some(PrefixMatch { cidr, operator, lengths })
        }
        (None, None) if prefix_length.is_none() => None,
        _ => return None,
    };
    let community = match communities.as_ref().map(|communities| communities.values.as_slice()) {
        None => None,
        Some([value]) => Some(value.parse().ok()?),
        Some(_) => return None,
    };
    let only_from_peers = match text(source).as_deref() {
        None => false,
        Some("RemotePeers") => true,
        Some(_) => return None,
    };
    let internal_peer = match text(peer_type).as_deref() {
        None => None,
        Some("iBGP") => Some(true),
        Some("eBGP") => Some(false),
        Some(_) => return None,
    };
    let conditions = Conditions {
        prefix,
        only_from_peers,
        only_static: false,
        interface: text(interface),
        internal_peer,
        community,
        as_path_prefix: as_path_prefix.clone(),
        priority: *priority,
    };
    let action = match action.as_str() {
        "Accept" => Action::Accept,
        "Reject" => Action::Reject,
        _ => return None,
    };
    let operations = operations.iter().map(operation).collect::<Option<_>>()?;
    Some(Rule { about: about.into(), conditions, action, operations })
}

fn operation(operation: &tortie_api::calico::Operation) -> Option<Operation> {
    match (&operation.add_community, &operation.prepend_as_path, &operation.set_priority) {
        (Some(add), None, None) => Some(Operation::AddCommunity(add.value.parse().ok()?)),
        (None, Some(prepend), None) => Some(Operation::PrependAsPath(prepend.prefix.clone())),
        (None, None, Some(priority)) => Some(Operation::SetPriority(priority.value)),
        _ => None,
    }
}

/// LOCAL_PREF of an own route with the usual priority.
#[must_use]
pub(super) fn normal_preference(priority: Option<u32>) -> u32 {
    crate::filter::HIGHEST_PREFERENCE - priority.unwrap_or(NORMAL_PRIORITY)
}
