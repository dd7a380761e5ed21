//! Routes in the words of routers and clouds.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::IpAddr;

use clap::ValueEnum;
use ipnet::IpNet;

use super::changes::Changes;
use super::plan::PodRoute;

/// The most routes of a table by default (AWS: quota of routes per table; Azure: routes per table).
const AWS_ROUTES: usize = 50;
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

/// The configuration or commands, and what they leave out. `total` is how many routes the router has then.
pub(super) fn render(
    router: Router,
    changes: &Changes,
    total: usize,
    cloud: &Cloud,
) -> (String, Vec<String>) {
    match router {
        Router::Text => (String::new(), Vec::new()),
        Router::Frr => (frr(changes), Vec::new()),
        Router::Bird => (bird(&changes.added), Vec::new()),
        Router::Linux => (linux(changes), Vec::new()),
        Router::Aws => aws(changes, total, cloud),
        Router::Azure => azure(changes, total, cloud),
        Router::Gcp => (gcp(changes, cloud), Vec::new()),
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
    let mut text = String::new();
    for PodRoute { destination, next_hop, node, .. } in &changes.added {
        let family = if destination.addr().is_ipv4() { "-4" } else { "-6" };
        let _ = writeln!(text, "ip {family} route replace {destination} via {next_hop} # {}", one_line(node));
    }
    // Run again after an interruption, the commands find routes that are gone already.
    for PodRoute { destination, next_hop, node, .. } in changes.gone() {
        let family = if destination.addr().is_ipv4() { "-4" } else { "-6" };
        let route = format!("{destination} via {next_hop}");
        let _ = writeln!(
            text,
            "[ -z \"$(ip {family} route show exact {route})\" ] || ip {family} route del {route} # {}",
            one_line(node)
        );
    }
    text
}

/// AWS sends packets to machines by their ids. A machine drops packets of others until its check of sources is off.
fn aws(changes: &Changes, total: usize, cloud: &Cloud) -> (String, Vec<String>) {
    let mut problems = Vec::new();
    let mut instances: BTreeMap<&str, &str> = BTreeMap::new();
    let table = quoted(&cloud.table);
    let option = |destination: &IpNet| match destination.addr().is_ipv4() {
        true => "--destination-cidr-block",
        false => "--destination-ipv6-cidr-block",
    };
    let mut commands = String::new();
    for PodRoute { destination, .. } in changes.gone() {
        let option = option(destination);
        let _ = writeln!(commands, "aws ec2 delete-route --route-table-id {table} {option} {destination}");
    }
    for PodRoute { destination, node, provider_id, .. } in &changes.added {
        let Some(instance) = provider_id.as_deref().and_then(instance) else {
            problems.push(format!(
                "{destination}: Node {node} has no spec.providerID such as aws:///eu-west-1a/i-0123456789abcdef0, so its machine is not known"
            ));
            continue;
        };
        instances.insert(node, instance);
        let verb = if changes.replaces(destination) { "replace-route" } else { "create-route" };
        let (option, instance) = (option(destination), quoted(instance));
        let _ = writeln!(
            commands,
            "aws ec2 {verb} --route-table-id {table} {option} {destination} --instance-id {instance}"
        );
    }
    let mut text = String::new();
    for instance in instances.values() {
        let instance = quoted(instance);
        let _ = writeln!(
            text,
            "aws ec2 modify-instance-attribute --instance-id {instance} --no-source-dest-check"
        );
    }
    problems.extend(too_many(total, AWS_ROUTES, "AWS"));
    (text + &commands, problems)
}

/// The id of the machine in a `providerID` of AWS.
fn instance(provider_id: &str) -> Option<&str> {
    provider_id.strip_prefix("aws:///")?.split('/').nth(1)
}

/// Whether the router got the route in an earlier run: AWS gets none to a machine that is not known.
pub(super) fn had(router: Router, route: &PodRoute) -> bool {
    router != Router::Aws || route.provider_id.as_deref().and_then(instance).is_some()
}

fn azure(changes: &Changes, total: usize, cloud: &Cloud) -> (String, Vec<String>) {
    let mut text = "# The network interface of each node needs IP forwarding: az network nic update --ip-forwarding true\n".to_owned();
    let (table, group) = (quoted(&cloud.table), quoted(&cloud.resource_group));
    for route in &changes.removed {
        let _ = writeln!(
            text,
            "az network route-table route delete --resource-group {group} --route-table-name {table} --name {}",
            name(route)
        );
    }
    for route @ PodRoute { destination, next_hop, .. } in &changes.added {
        let _ = writeln!(
            text,
            "az network route-table route create --resource-group {group} --route-table-name {table} --name {} --address-prefix {destination} --next-hop-type VirtualAppliance --next-hop-ip-address {next_hop}",
            name(route)
        );
    }
    (text, too_many(total, AZURE_ROUTES, "Azure").into_iter().collect())
}

fn gcp(changes: &Changes, cloud: &Cloud) -> String {
    let mut text =
        "# Each machine needs IP forwarding, which is set when it is created: --can-ip-forward\n".to_owned();
    for route in &changes.removed {
        let _ = writeln!(text, "gcloud compute routes delete {} --quiet", name(route));
    }
    for route @ PodRoute { destination, next_hop, .. } in &changes.added {
        let network = quoted(&cloud.network);
        let _ = writeln!(
            text,
            "gcloud compute routes create {} --network {network} --destination-range {destination} --next-hop-address {next_hop}",
            name(route)
        );
    }
    text
}

fn too_many(count: usize, limit: usize, cloud: &str) -> Option<String> {
    (count > limit).then(|| {
        format!("{count} routes: a route table of {cloud} has at most {limit} unless its quota is raised; larger blocks (blockSize of the IPPool) need fewer")
    })
}

/// A name of a route from its destination: letters, digits and hyphens. All parts of an address are there, so that two
/// destinations have two names.
fn name(route: &PodRoute) -> String {
    let parts: Vec<String> = match route.destination.network() {
        IpAddr::V4(address) => address.octets().iter().map(ToString::to_string).collect(),
        IpAddr::V6(address) => address.segments().iter().map(|part| format!("{part:x}")).collect(),
    };
    format!("tortie-{}-{}", parts.join("-"), route.destination.prefix_len())
}

/// A node's name in a comment. A name from a file may have line ends, after which a router would read commands.
fn one_line(name: &str) -> String {
    name.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// An argument for a shell.
fn quoted(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:".contains(c);
    match !text.is_empty() && text.chars().all(is_plain) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_comments_have_no_line_ends() {
        assert_eq!(one_line("alpha\nreboot\r"), "alpha?reboot?");
    }

    #[test]
    fn arguments_of_a_shell_are_quoted_where_necessary() {
        for (text, expected) in [
            ("rtb-0a", "rtb-0a"),
            ("my group", "'my group'"),
            ("", "''"),
            ("it's", r"'it'\''s'"),
            ("$x", "'$x'"),
        ] {
            assert_eq!(quoted(text), expected);
        }
    }

    /// Two destinations must not have one name, also if they differ only in where zeroes are left out.
    #[test]
    fn names_of_routes_are_valid_and_differ() {
        let route = |destination: &str| PodRoute {
            destination: destination.parse().unwrap(),
            next_hop: "192.0.2.1".parse().unwrap(),
            node: "n".to_owned(),
            provider_id: None,
        };
        let names: Vec<String> =
            ["10.0.0.64/26", "fd00::1:0/112", "fd00:1::/112", "fd00::1/128", "fd00:1::/128"]
                .map(|destination| name(&route(destination)))
                .into();
        assert_eq!(names[0], "tortie-10-0-0-64-26");
        let mut unique = names.clone();
        unique.sort();
        unique.dedup();
        assert_eq!(unique.len(), names.len(), "{names:?}");
        assert!(names.iter().all(|name| name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')));
    }
}
