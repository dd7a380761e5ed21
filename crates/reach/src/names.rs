//! Names of classes for readers.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;

use super::class::{Class, ClassKind, PodName};
use tortie_api::manifest::first_pod;
use tortie_oracle::Peer;

type Labels = BTreeMap<String, String>;

/// The maximum number of listed workloads or namespaces in a name.
const SPELLED_OUT: usize = 3;
/// The letters and digits of names that Kubernetes generates.
const MADE_UP: &str = "bcdfghjklmnpqrstvwxz2456789";

/// The workload of a pod, as far as its name tells: `front-*` for `front-5d8f6c7b9-x2x4k`.
pub(super) fn workload(pod: &str, labels: Option<&Labels>) -> String {
    let pod = first_pod(pod).unwrap_or(pod);
    let of = |text: &str| -> Option<String> {
        let (rest, last) = text.rsplit_once('-')?;
        if !last.is_empty() && last.bytes().all(|byte| byte.is_ascii_digit()) {
            return Some(rest.to_owned());
        }
        let made_up = |part: &str| part.chars().all(|letter| MADE_UP.contains(letter));
        if last.len() != 5 || !made_up(last) {
            return None;
        }
        let hash = labels.and_then(|labels| labels.get("pod-template-hash"));
        let of_replica_set = rest.rsplit_once('-').filter(|(_, part)| match hash {
            Some(hash) => part == hash,
            None => (8..=10).contains(&part.len()) && made_up(part),
        });
        Some(of_replica_set.map_or(rest, |(name, _)| name).to_owned())
    };
    of(pod).map_or_else(|| pod.to_owned(), |name| format!("{name}-*"))
}

/// The labels that all members share, as a list from which [`give`] later selects those that distinguish classes.
pub(super) fn such_as(labels: &[Option<&Labels>]) -> String {
    let mut all = labels.iter().map(|labels| labels.cloned().unwrap_or_default());
    let mut common: Labels = all.next().unwrap_or_default();
    for labels in all {
        common.retain(|name, value| labels.get(name) == Some(value));
    }
    let words: Vec<String> = common.iter().map(|(name, value)| format!("{name}={value}")).collect();
    words.join("\n")
}

/// Outsiders, by the networks that contain them while no narrower network does.
pub(super) fn of_nets(nets: &[IpNet]) -> String {
    if nets.iter().any(|net| net.prefix_len() == 0) {
        let v6 = nets.iter().all(|net| net.addr().is_ipv6());
        return if v6 { "outside (IPv6)".to_owned() } else { "outside".to_owned() };
    }
    let shown: Vec<String> = nets.iter().take(SPELLED_OUT).map(ToString::to_string).collect();
    let more = nets.len() - shown.len();
    match more {
        0 => shown.join(", "),
        more => format!("{} and {more} more networks", shown.join(", ")),
    }
}

/// Gives every class a unique name.
pub(super) fn give(classes: &mut [Class]) {
    let mut sizes: BTreeMap<String, usize> = BTreeMap::new();
    for class in classes.iter() {
        for (namespace, ..) in &class.pods {
            *sizes.entry(namespace.clone()).or_default() += 1;
        }
    }
    let bare: Vec<String> = classes.iter().map(|class| bare(class, &sizes)).collect();
    let labels: Vec<BTreeSet<String>> =
        classes.iter().map(|class| class.name.lines().map(str::to_owned).collect()).collect();
    let mut alike: BTreeMap<&String, Vec<usize>> = BTreeMap::new();
    for (index, name) in bare.iter().enumerate() {
        alike.entry(name).or_default().push(index);
    }
    let mut taken = BTreeSet::new();
    let mut names = Vec::with_capacity(classes.len());
    for (index, class) in classes.iter().enumerate() {
        let mut name = bare.get(index).cloned().unwrap_or_default();
        let others = alike.get(&name).map_or(&[][..], Vec::as_slice);
        if others.len() > 1 {
            name.push_str(&telling(index, others, &labels));
        }
        if !taken.insert(name.clone()) || (others.len() > 1 && !name.ends_with(']')) {
            name = format!("{name} like {}", class.members.first().map(short).unwrap_or_default());
            taken.insert(name.clone());
        }
        if class.kind != ClassKind::Outside && class.count() > 1 {
            name = format!("{name} ({})", class.count());
        }
        names.push(name);
    }
    for (class, name) in classes.iter_mut().zip(names) {
        class.name = name;
    }
}

/// One or two labels that this class has and no class of the same name has.
fn telling(index: usize, others: &[usize], labels: &[BTreeSet<String>]) -> String {
    let Some(own) = labels.get(index) else { return String::new() };
    let rarely = |label: &&String| {
        let with =
            others.iter().filter(|other| labels.get(**other).is_some_and(|labels| labels.contains(*label)));
        with.count()
    };
    // Generated hashes and names do not help readers.
    let made_up = |label: &&String| {
        ["pod-template-hash=", "controller-revision-hash="].iter().any(|hash| label.starts_with(hash))
    };
    let mut candidates: Vec<&String> =
        own.iter().filter(|label| !made_up(label) && rarely(label) < others.len()).collect();
    candidates.sort_by_key(rarely);
    match candidates.first() {
        Some(label) if rarely(label) == 1 => format!("[{label}]"),
        Some(_) => {
            let two: Vec<&str> = candidates.iter().take(2).map(|label| label.as_str()).collect();
            format!("[{}]", two.join(","))
        }
        None => String::new(),
    }
}

fn short(peer: &Peer) -> String {
    match peer {
        Peer::Pod { name, .. } => name.clone(),
        peer => peer.to_string(),
    }
}

fn bare(class: &Class, sizes: &BTreeMap<String, usize>) -> String {
    match (class.kind, class.members.as_slice()) {
        (ClassKind::Outside, _) => class.name.clone(),
        (_, [only]) => only.to_string(),
        (ClassKind::Nodes, _) => "nodes".to_owned(),
        (ClassKind::Pods, _) => of_workloads(&class.pods, sizes),
    }
}

/// `web/*` for all pods of a namespace, `web/{a-*, b-0}`, `web/*, shop/*`.
pub(super) fn of_workloads(pods: &[PodName], sizes: &BTreeMap<String, usize>) -> String {
    let mut namespaces: BTreeMap<&str, BTreeMap<&str, Vec<&str>>> = BTreeMap::new();
    for (namespace, workload, name) in pods {
        namespaces.entry(namespace).or_default().entry(workload).or_default().push(name);
    }
    let one = |(namespace, workloads): (&&str, &BTreeMap<&str, Vec<&str>>)| {
        let count: usize = workloads.values().map(Vec::len).sum();
        if sizes.get(*namespace) == Some(&count) && workloads.len() > 1 {
            return format!("{namespace}/*");
        }
        let name = |(workload, pods): (&&str, &Vec<&str>)| match pods.as_slice() {
            [only] => (*only).to_owned(),
            _ => (*workload).to_owned(),
        };
        let shown: Vec<String> = workloads.iter().take(SPELLED_OUT).map(name).collect();
        match (shown.as_slice(), workloads.len() - shown.len()) {
            ([only], 0) => format!("{namespace}/{only}"),
            (_, 0) => format!("{namespace}/{{{}}}", shown.join(", ")),
            (_, more) => format!("{namespace}/{{{} and {more} more}}", shown.join(", ")),
        }
    };
    let shown: Vec<String> = namespaces.iter().take(SPELLED_OUT).map(one).collect();
    match namespaces.len() - shown.len() {
        0 => shown.join(", "),
        more => format!("{} and {more} more namespaces", shown.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workloads() {
        let hash = |hash: &str| BTreeMap::from([("pod-template-hash".to_owned(), hash.to_owned())]);
        for (pod, labels, expected) in [
            ("front-5d8f6c7b9-x2x4k", None, "front-*"),
            ("front-5d8f6c7b9-x2x4k", Some(hash("5d8f6c7b9")), "front-*"),
            ("front-5d8f6c7b9-x2x4k", Some(hash("other")), "front-5d8f6c7b9-*"),
            ("node-agent-x9s2b", None, "node-agent-*"),
            ("db-0", None, "db-*"),
            ("db-main-12", None, "db-main-*"),
            ("front", None, "front"),
            ("front-aeiou", None, "front-aeiou"),
            ("linux-client", None, "linux-client"),
        ] {
            assert_eq!(workload(pod, labels.as_ref()), expected, "{pod}");
        }
    }

    #[test]
    fn several_workloads_and_namespaces() {
        let pod = |namespace: &str, workload: &str, name: &str| {
            (namespace.to_owned(), workload.to_owned(), name.to_owned())
        };
        let sizes = BTreeMap::from([("a".to_owned(), 3), ("b".to_owned(), 9)]);
        let (one, two) = (pod("a", "x-*", "x-1"), pod("a", "x-*", "x-2"));
        let three = pod("a", "y-*", "y-1");
        for (pods, expected) in [
            (vec![one.clone()], "a/x-1"),
            (vec![one.clone(), two.clone()], "a/x-*"),
            (vec![one.clone(), three.clone()], "a/{x-1, y-1}"),
            (vec![one.clone(), two, three], "a/*"),
            (vec![one, pod("b", "z", "z")], "a/x-1, b/z"),
            (
                (0..5).map(|n| pod("b", &format!("w{n}"), &format!("w{n}"))).collect(),
                "b/{w0, w1, w2 and 2 more}",
            ),
        ] {
            assert_eq!(of_workloads(&pods, &sizes), expected);
        }
    }
}
