//! Routes in the words of routers and clouds.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::net::IpAddr;

use clap::ValueEnum;
use ipnet::IpNet;

use super::changes::{Changes, RouteBefore};
use super::plan::PodRoute;
use super::script::{Script, if_any, one_line, quoted};

/// The most routes of a table by default (AWS: quota of routes per table, for each family; Azure: routes per table).
const AWS_ROUTES: usize = 500;
const AZURE_ROUTES: usize = 400;

/// A router, or the client of a cloud.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Router {
    /// A table for people.
    Text,
    /// FRR, and what reads the commands of vtysh.
    Frr,
    /// BIRD 2.
    Bird,
    /// iproute2.
    Linux,
    /// The AWS client.
    Aws,
    /// The Azure client.
    Azure,
    /// The client of Google Cloud.
    Gcp,
}

/// Names that only the user knows.
pub(super) struct Cloud {
    pub(super) table: String,
    pub(super) resource_group: String,
    pub(super) network: String,
}

/// Rows for people.
pub(super) fn rows(routes: &[PodRoute]) -> Vec<Vec<String>> {
    let mut rows = vec![["DESTINATION", "NEXT HOP", "NODE"].map(str::to_owned).to_vec()];
    rows.extend(routes.iter().map(row));
    rows
}

/// Rows for people, with what becomes of each route.
pub(super) fn rows_of_changes(changes: &Changes) -> Vec<Vec<String>> {
    let with = |word: &'static str| move |route| [vec![word.to_owned()], row(route)].concat();
    let mut rows = vec![["CHANGE", "DESTINATION", "NEXT HOP", "NODE"].map(str::to_owned).to_vec()];
    rows.extend(changes.removed.iter().map(with("remove")));
    rows.extend(changes.added.iter().map(with("add")));
    rows
}

fn row(PodRoute { destination, next_hop, node, .. }: &PodRoute) -> Vec<String> {
    vec![destination.to_string(), next_hop.to_string(), node.clone()]
}

/// What a router reads.
#[derive(Default)]
pub(super) struct Rendered {
    /// The configuration or commands.
    pub(super) text: String,
    /// What they leave out.
    pub(super) problems: Vec<String>,
    /// What may be a problem.
    pub(super) notes: Vec<String>,
}

/// The configuration or commands. `all` are the routes that the router has then.
pub(super) fn render(router: Router, changes: &Changes, all: &[PodRoute], cloud: &Cloud) -> Rendered {
    let only = |text| Rendered { text, ..Rendered::default() };
    match router {
        Router::Text => Rendered::default(),
        Router::Frr => only(frr(changes)),
        Router::Bird => only(bird(&changes.added)),
        Router::Linux => only(linux(changes)),
        Router::Aws => aws(changes, all, cloud),
        Router::Azure => azure(changes, all, cloud),
        Router::Gcp => only(gcp(changes, cloud)),
    }
}

/// Lines that the router or shell skips: a file that is looked at later says itself what it leaves out.
pub(super) fn comments(router: Router, lines: &[String]) -> String {
    let mark = if router == Router::Frr { '!' } else { '#' };
    lines.iter().map(|line| format!("{mark} {}\n", one_line(line))).collect()
}

/// A new route comes before the old one goes, so that there always is one.
fn frr(changes: &Changes) -> String {
    let mut text = String::new();
    let mut write = |no: &str, PodRoute { destination, next_hop, node, .. }: &PodRoute| {
        let family = if destination.addr().is_ipv4() { "ip" } else { "ipv6" };
        let _ = writeln!(text, "! {}\n{no}{family} route {destination} {next_hop}", one_line(node));
    };
    changes.added.iter().for_each(|route| write("", route));
    changes.removed.iter().for_each(|route| write("no ", route));
    text
}

fn bird(routes: &[PodRoute]) -> String {
    let mut text = String::new();
    for (family, name) in [("ipv4", "tortie_v4"), ("ipv6", "tortie_v6")] {
        let of_family = |route: &&PodRoute| route.destination.addr().is_ipv4() == (family == "ipv4");
        let mut routes = routes.iter().filter(of_family).peekable();
        if routes.peek().is_none() {
            continue;
        }
        let _ = writeln!(text, "protocol static {name} {{\n    {family};");
        for PodRoute { destination, next_hop, node, .. } in routes {
            let _ = writeln!(text, "    route {destination} via {next_hop}; # {}", one_line(node));
        }
        text.push_str("}\n");
    }
    text
}

fn linux(changes: &Changes) -> String {
    let mut script = Script::default();
    let family = |destination: &IpNet| if destination.addr().is_ipv4() { "-4" } else { "-6" };
    for PodRoute { destination, next_hop, node, .. } in &changes.added {
        let command = format!("ip {} route replace {destination} via {next_hop}", family(destination));
        script.run_for(&command, &destination.to_string(), node);
    }
    // After an interruption, the commands find routes that are gone already.
    for PodRoute { destination, next_hop, node, .. } in changes.gone() {
        let (family, route) = (family(destination), format!("{destination} via {next_hop}"));
        let shown = format!("ip {family} route show exact {route}");
        let command = if_any(&shown, &format!("ip {family} route del {route}"));
        script.run_for(&command, &destination.to_string(), node);
    }
    script.end()
}

/// AWS sends packets to machines by their ids. A machine drops packets of others until its check of sources is off.
fn aws(changes: &Changes, all: &[PodRoute], cloud: &Cloud) -> Rendered {
    let mut problems = Vec::new();
    let mut instances: BTreeMap<&str, &str> = BTreeMap::new();
    for PodRoute { destination, node, provider_id, .. } in &changes.added {
        match provider_id.as_deref().and_then(instance) {
            Some(instance) => drop(instances.insert(node, instance)),
            None => problems.push(format!(
                "{destination}: Node {node} has no spec.providerID such as aws:///eu-west-1a/i-0123456789abcdef0, so its machine is not known"
            )),
        }
    }
    let mut script = Script::default();
    for instance in instances.values() {
        let quoted = quoted(instance);
        let command =
            format!("aws ec2 modify-instance-attribute --instance-id {quoted} --no-source-dest-check");
        script.run(&command, instance);
    }
    let table = quoted(&cloud.table);
    let option = |destination: &IpNet| match destination.addr().is_ipv4() {
        true => "destination-cidr-block",
        false => "destination-ipv6-cidr-block",
    };
    for destination in changes.gone_destinations() {
        let option = option(&destination);
        let query = format!(
            "aws ec2 describe-route-tables --route-table-ids {table} --filters Name=route.{option},Values={destination} --query 'RouteTables[].RouteTableId' --output text"
        );
        let delete = format!("aws ec2 delete-route --route-table-id {table} --{option} {destination}");
        script.run(&if_any(&query, &delete), &destination.to_string());
    }
    for PodRoute { destination, node, provider_id, .. } in &changes.added {
        let Some(instance) = provider_id.as_deref().and_then(instance) else { continue };
        let (option, instance) = (option(destination), quoted(instance));
        let with = |verb: &str| {
            format!(
                "aws ec2 {verb} --route-table-id {table} --{option} {destination} --instance-id {instance}"
            )
        };
        let command = match changes.presence(destination) {
            RouteBefore::No => with("create-route"),
            RouteBefore::Yes => with("replace-route"),
            RouteBefore::Perhaps => {
                format!("{} 2>/dev/null || {}", with("replace-route"), with("create-route"))
            }
        };
        script.run_for(&command, &destination.to_string(), node);
    }
    let notes = [true, false].into_iter().filter_map(|is_ipv4| {
        let of_family = all.iter().filter(|route| route.destination.addr().is_ipv4() == is_ipv4);
        too_many(of_family, if is_ipv4 { " IPv4" } else { " IPv6" }, AWS_ROUTES, "AWS")
    });
    Rendered { text: script.end(), problems, notes: notes.collect() }
}

/// The id of the machine in a `providerID` of AWS.
fn instance(provider_id: &str) -> Option<&str> {
    provider_id.strip_prefix("aws:///")?.split('/').nth(1)
}

/// Whether the router got the route in an earlier run: AWS gets none to a machine that is not known.
pub(super) fn had(router: Router, route: &PodRoute) -> bool {
    router != Router::Aws || route.provider_id.as_deref().and_then(instance).is_some()
}

/// A client of Azure replaces a route that it creates, and deletes one that is not there.
fn azure(changes: &Changes, all: &[PodRoute], cloud: &Cloud) -> Rendered {
    let (table, group) = (quoted(&cloud.table), quoted(&cloud.resource_group));
    let mut script = Script::default();
    for PodRoute { destination, next_hop, node, .. } in &changes.added {
        let command = format!(
            "az network route-table route create --resource-group {group} --route-table-name {table} --name {} --address-prefix {destination} --next-hop-type VirtualAppliance --next-hop-ip-address {next_hop}",
            name("", destination)
        );
        script.run_for(&command, &destination.to_string(), node);
    }
    for destination in changes.gone_destinations() {
        let command = format!(
            "az network route-table route delete --resource-group {group} --route-table-name {table} --name {}",
            name("", &destination)
        );
        script.run(&command, &destination.to_string());
    }
    let text = format!(
        "# The network interface of each node needs IP forwarding: az network nic update --ip-forwarding true\n{}",
        script.end()
    );
    let notes = too_many(all.iter(), "", AZURE_ROUTES, "Azure").into_iter().collect();
    Rendered { text, problems: Vec::new(), notes }
}

/// A route of Google Cloud cannot be changed: it goes, and comes again.
fn gcp(changes: &Changes, cloud: &Cloud) -> String {
    let network = quoted(&cloud.network);
    let of_network = format!("{:08x}-", fnv1a(network_name(&cloud.network)));
    let name = |destination: &IpNet| name(&of_network, destination);
    let delete = |destination: &IpNet| {
        let name = name(destination);
        let query = format!("gcloud compute routes list --filter=name={name} --format='value(name)'");
        if_any(&query, &format!("gcloud compute routes delete {name} --quiet"))
    };
    let mut script = Script::default();
    for destination in changes.gone_destinations() {
        script.run(&delete(&destination), &destination.to_string());
    }
    for PodRoute { destination, next_hop, node, .. } in &changes.added {
        let (name, subject) = (name(destination), destination.to_string());
        if changes.presence(destination) != RouteBefore::No {
            script.run(&delete(destination), &subject);
        }
        let command = format!(
            "gcloud compute routes create {name} --network {network} --destination-range {destination} --next-hop-address {next_hop}"
        );
        script.run_for(&command, &subject, node);
    }
    format!(
        "# Each machine needs IP forwarding, which is set when it is created: --can-ip-forward\n{}",
        script.end()
    )
}

fn too_many<'a>(
    routes: impl Iterator<Item = &'a PodRoute>,
    family: &str,
    limit: usize,
    cloud: &str,
) -> Option<String> {
    let destinations: BTreeSet<IpNet> = routes.map(|route| route.destination).collect();
    let count = destinations.len();
    (count > limit).then(|| {
        format!("{count}{family} routes: a route table of {cloud} has at most {limit} of them unless its quota is raised; larger blocks (blockSize of the IPPool) need fewer")
    })
}

/// A name of a route from its destination: letters, digits and hyphens. All parts of an address are there, so that two
/// destinations have two names.
fn name(of_network: &str, destination: &IpNet) -> String {
    let parts: Vec<String> = match destination.network() {
        IpAddr::V4(address) => address.octets().iter().map(ToString::to_string).collect(),
        IpAddr::V6(address) => address.segments().iter().map(|part| format!("{part:x}")).collect(),
    };
    format!("tortie-{of_network}{}-{}", parts.join("-"), destination.prefix_len())
}

/// The name of a network of Google Cloud, which may be given by its URL, too.
fn network_name(network: &str) -> &str {
    network.rsplit('/').next().unwrap_or(network)
}

/// The hash FNV-1a (32 bits). Names of routes are those of a project, and two networks may have routes to the same destination: their
/// names must differ, and be at most 63 characters long.
fn fnv1a(text: &str) -> u32 {
    text.bytes().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two destinations must not have one name, also if they differ only in where zeroes are left out.
    #[test]
    fn names_of_routes_are_valid_and_differ() {
        let longest = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff/128";
        let destinations =
            ["10.0.0.64/26", "fd00::1:0/112", "fd00:1::/112", "fd00::1/128", "fd00:1::/128", longest];
        let names: Vec<String> =
            destinations.map(|destination| name("01234567-", &destination.parse().unwrap())).into();
        assert_eq!(names[0], "tortie-01234567-10-0-0-64-26");
        let mut unique = names.clone();
        unique.sort();
        unique.dedup();
        assert_eq!(unique.len(), names.len(), "{names:?}");
        let is_valid =
            |name: &String| name.len() <= 63 && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
        assert!(names.iter().all(is_valid), "{names:?}");
    }

    /// Published test vectors of FNV-1a.
    #[test]
    fn the_hash_is_fnv1a() {
        for (text, expected) in [("", 0x811c_9dc5), ("a", 0xe40c_292c), ("foobar", 0xbf9c_f968)] {
            assert_eq!(fnv1a(text), expected, "{text}");
        }
    }
}
