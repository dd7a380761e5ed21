//! What a node has that an installation may change, and the difference between two moments.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, bail, ensure};

use super::node_command;

/// A part of a node: its name, the command that lists it, and whether it can be empty.
type Part = (&'static str, &'static str, Emptiness);

/// Whether a list can be empty on a node that is well.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Emptiness {
    Possible,
    Impossible,
}
use Emptiness::{Impossible, Possible};

/// The parts. Other programs change some things at any time, which the commands leave out:
/// - entries of neighbours that the kernel has learned;
/// - the tables of kube-proxy, and those of `iptables`, which kubelets make; but no rule in any table may name Tortie or its links;
/// - `ip_forward`, and what the kernel derives from it (`forwarding`, `accept_redirects`), which stays because others may need it.
const PARTS: [Part; 15] = [
    ("link", "ip -o link | cut -d: -f2 | cut -d@ -f1", Impossible),
    ("address", "ip -o address | sed 's/^[0-9]*: //; s/ valid_lft.*//'", Impossible),
    ("IPv4 route", "ip -4 route show table all", Impossible),
    ("IPv6 route", "ip -6 route show table all", Impossible),
    ("IPv4 rule", "ip -4 rule", Impossible),
    ("IPv6 rule", "ip -6 rule", Impossible),
    ("neighbour", "ip neigh show nud permanent", Possible),
    ("bridge entry", "bridge fdb show", Possible),
    ("nftables table", "nft list tables | sed '/^table ip6* [fmnr]/d; /kube-proxy/d'", Possible),
    ("rule of Tortie", "nft --json --stateless list ruleset | sed 's/, {/\\n{/g' | sed -n '/tortie/Ip; /cali/Ip'", Possible),
    ("network configuration", "ls -A /etc/cni/net.d", Possible),
    ("plugin", "ls -A /opt/cni/bin", Possible),
    (
        "file",
        "find /run /var/lib /etc /opt -xdev ( -path /var/lib/containerd -o -path /var/lib/kubelet -o -path /run/containerd ) -prune
            -o ( -iname '*tortie*' -o -iname '*calico*' ) -print",
        Possible,
    ),
    ("socket", "ss --listening --unix --no-header | sed -n /tortie/p", Possible),
    (
        "kernel parameter",
        "find /proc/sys/net/ipv4/conf /proc/sys/net/ipv4/neigh /proc/sys/net/ipv6/conf /proc/sys/net/ipv6/neigh -type f -perm /400
            -not -name stable_secret -not -name *forwarding -not -name accept_redirects -exec grep -H . {} +",
        Impossible,
    ),
];

/// The lines of each part.
pub(super) type Survey = BTreeMap<&'static str, Vec<String>>;

/// Surveys a node.
///
/// # Errors
/// A command fails, complains, or lists nothing although there must be something.
pub(super) fn survey(node: &str) -> Result<Survey> {
    PARTS
        .into_iter()
        .map(|(part, command, emptiness)| {
            let script = format!("set -o pipefail -f; {}", command.replace('\n', " "));
            let script = script.replace("( ", "\\( ").replace(" )", " \\)");
            let output = node_command(node, &["bash", "-c", &script])?.output()?;
            let complaints = String::from_utf8_lossy(&output.stderr).into_owned();
            let listed = String::from_utf8_lossy(&output.stdout).into_owned();
            let lines = lines(output.status.success(), &listed, &complaints, emptiness);
            Ok((part, lines.with_context(|| format!("{part} of {node}: {command}"))?))
        })
        .collect()
}

/// The lines of a list, if it can be believed.
fn lines(succeeded: bool, listed: &str, complaints: &str, emptiness: Emptiness) -> Result<Vec<String>> {
    ensure!(complaints.trim().is_empty(), "the command complains: {}", complaints.trim());
    ensure!(succeeded, "the command fails");
    if emptiness == Impossible && listed.trim().is_empty() {
        bail!("the command lists nothing");
    }
    Ok(listed.lines().map(|line| line.trim().to_owned()).collect())
}

/// The lines that one survey has and the other one does not have, or has more often. The order of lines has no meaning.
pub(super) fn difference(before: &Survey, after: &Survey) -> Vec<String> {
    let mut differences = Vec::new();
    let parts: Vec<_> = PARTS.iter().map(|(part, ..)| *part).collect();
    for part in parts {
        let mut counts: BTreeMap<&str, i64> = BTreeMap::new();
        for line in after.get(part).into_iter().flatten() {
            *counts.entry(line).or_default() += 1;
        }
        for line in before.get(part).into_iter().flatten() {
            *counts.entry(line).or_default() -= 1;
        }
        for (line, count) in counts {
            let sign = if count > 0 { "+" } else { "-" };
            differences.extend((0..count.abs()).map(|_| format!("{sign} {part}: {line}")));
        }
    }
    differences
}

/// The parts to which an installation with a pod must have added something. A survey that does not see that would not see what an
/// uninstallation leaves.
const CHANGED: [&str; 10] = [
    "link",
    "IPv4 route",
    "neighbour",
    "bridge entry",
    "nftables table",
    "rule of Tortie",
    "network configuration",
    "plugin",
    "file",
    "socket",
];

/// The parts of [`CHANGED`] in which nothing is new.
pub(super) fn unseen(before: &Survey, after: &Survey) -> Vec<&'static str> {
    let new = difference(before, after);
    let is_unseen = |part: &&str| !new.iter().any(|line| line.starts_with(&format!("+ {part}: ")));
    CHANGED.into_iter().filter(is_unseen).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn surveyed(parts: &[(&'static str, &[&str])]) -> Survey {
        parts
            .iter()
            .map(|(part, lines)| (*part, lines.iter().map(|line| (*line).to_owned()).collect()))
            .collect()
    }

    #[test]
    fn differences_are_those_of_content_and_number() {
        let before = surveyed(&[("link", &["lo", "eth0"]), ("IPv4 rule", &["0: all", "1: all", "1: all"])]);
        assert_eq!(difference(&before, &before), Vec::<String>::new());
        let other_order =
            surveyed(&[("link", &["eth0", "lo"]), ("IPv4 rule", &["1: all", "0: all", "1: all"])]);
        assert_eq!(difference(&before, &other_order), Vec::<String>::new());
        let after = surveyed(&[
            ("link", &["lo", "lo", "cali1"]),
            ("IPv4 rule", &["0: all", "1: all", "1: all"]),
            ("neighbour", &["10.0.0.1 PERMANENT"]),
        ]);
        assert_eq!(
            difference(&before, &after),
            ["+ link: cali1", "- link: eth0", "+ link: lo", "+ neighbour: 10.0.0.1 PERMANENT"]
        );
        assert_eq!(difference(&after, &Survey::new()).len(), 7, "a part that is not listed differs");
        let unseen = unseen(&before, &after);
        assert_eq!(unseen.len(), CHANGED.len() - 2, "{unseen:?}");
        assert!(!unseen.contains(&"link") && !unseen.contains(&"neighbour"));
    }

    #[test]
    fn each_part_has_a_name_of_its_own() {
        let names: std::collections::BTreeSet<_> = PARTS.iter().map(|(part, ..)| part).collect();
        assert_eq!(names.len(), PARTS.len());
        assert!(CHANGED.iter().all(|part| names.contains(part)));
    }

    #[test]
    fn a_list_of_a_command_that_fails_or_complains_is_an_error() {
        assert_eq!(lines(true, " a\nb\n", "", Impossible).unwrap(), ["a", "b"]);
        assert!(lines(true, "", "", Possible).unwrap().is_empty());
        for (succeeded, listed, complaints, emptiness, expected) in [
            (false, "a\n", "", Possible, "fails"),
            (true, "a\n", "ip: permission denied", Possible, "permission denied"),
            (true, "\n", "", Impossible, "lists nothing"),
        ] {
            let error = lines(succeeded, listed, complaints, emptiness).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
