//! The node's own addresses, as the annotations of its Node have them and as they should be.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use serde_json::Value;
use tortie_api::kubernetes::Node;
use tortie_api::net::IpVersion;
use tortie_dataplane::{Condition, Reason};

use crate::AgentError;
use crate::node_address::AddressFinder;

/// How long an address is missing on all interfaces before another one replaces it. Interfaces have no addresses for a moment
/// when a machine starts, and when somebody configures them anew.
const PATIENCE: Duration = Duration::from_secs(5 * 60);

/// The annotation of the node's own address of a family.
const fn own(version: IpVersion) -> &'static str {
    match version {
        IpVersion::V4 => Node::ADDRESS,
        IpVersion::V6 => Node::ADDRESS_V6,
    }
}

/// What a look at the node's own addresses finds.
#[derive(Debug, Default)]
pub(crate) struct OwnAddresses {
    /// The annotations that may have to change.
    pub(crate) annotations: BTreeMap<&'static str, Option<String>>,
    /// The families whose annotations of flannel stay: no interface has the address there, perhaps for a moment.
    pub(crate) of_flannel: BTreeSet<IpVersion>,
}

/// What should become of the annotation of one family.
#[derive(Debug, PartialEq, Eq)]
enum Decision {
    Keep,
    /// The interfaces cannot be read, so nothing changes.
    Unknown,
    Write(String),
    Missing(Missing),
}

/// An address in an annotation that no interface has.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Missing {
    address: IpAddr,
    /// The annotation.
    name: &'static str,
    /// What replaces it if it stays away. Otherwise nobody knows another one.
    instead: Option<String>,
}

/// The addresses in annotations that no interface has, with the times since which they have been missing.
#[derive(Debug, Default)]
pub(crate) struct MissingAddresses {
    since: BTreeMap<IpVersion, (Missing, Instant)>,
    /// The families whose addresses had been missing for long at the last look.
    overdue: BTreeSet<IpVersion>,
    /// The families in which the method of the operator finds no address, and why. The annotation stays.
    unfound: BTreeMap<IpVersion, String>,
}

impl MissingAddresses {
    /// Ingests what is missing of a family now. Returns whether it has been missing for long.
    fn update(&mut self, version: IpVersion, found: Option<&Missing>, now: Instant) -> bool {
        let former = self.since.remove(&version);
        self.overdue.remove(&version);
        let Some(missing) = found else { return false };
        let former = former.filter(|(former, _)| former.address == missing.address);
        let since = former.map_or(now, |(_, since)| since);
        self.since.insert(version, (missing.clone(), since));
        let is_overdue = now.saturating_duration_since(since) >= PATIENCE;
        if is_overdue {
            self.overdue.insert(version);
        }
        is_overdue
    }

    /// The families whose addresses have been missing for long, and nobody knows another one.
    pub(crate) fn given_up(&self) -> BTreeSet<IpVersion> {
        let has_none = |version: &&IpVersion| {
            self.since.get(version).is_some_and(|(missing, _)| missing.instead.is_none())
        };
        self.overdue.iter().filter(has_none).copied().collect()
    }

    /// Fails if a method finds no address. An agent that starts cannot tell whether an annotation is still right.
    pub(crate) fn all_found(&self, node: &str) -> Result<(), AgentError> {
        let problem = self.unfound.values().next();
        problem.map_or(Ok(()), |problem| {
            Err(AgentError::Node { node: node.to_owned(), problem: problem.clone() })
        })
    }

    /// Whether the interfaces should be looked at at each tick. What has been given up may return too, and is looked at with the next
    /// change of the Node, which kubelets report every few minutes.
    pub(crate) fn need_looks(&self) -> bool {
        self.since.len() > self.given_up().len()
    }

    /// The conditions of the node.
    pub(crate) fn conditions(&self) -> Vec<Condition> {
        let missing = self.since.iter().map(|(version, (missing, _))| missing.condition(*version));
        let unfound = self.unfound.iter().map(|(version, problem)| {
            let message = format!("{problem}. What the node has announced for {version} stays");
            Condition::new(Reason::RouteRefused, message)
        });
        missing.chain(unfound).collect()
    }
}

impl Missing {
    fn is_of_flannel(&self, version: IpVersion) -> bool {
        self.name == Node::FLANNEL_ADDRESS.of(version)
    }

    fn condition(&self, version: IpVersion) -> Condition {
        let Self { address, name, instead } = self;
        let minutes = PATIENCE.as_secs() / 60;
        let next = match instead {
            _ if self.is_of_flannel(version) => {
                format!(
                    "if it stays away, Tortie removes what flannel has announced for {version} after {minutes} minutes"
                )
            }
            Some(instead) => format!("if it stays away, {instead} replaces it after {minutes} minutes"),
            None => format!("the kubelet reports no {version} address, so the annotation stays"),
        };
        let message = format!(
            "no interface has the node's address {address} (annotation {name}), so packets from other nodes may not arrive; {next}. Give an \
             interface the address, or correct or remove the annotation"
        );
        Condition::new(Reason::RouteRefused, message)
    }
}

/// Looks which annotations of the node's own addresses may have to change. A family whose method finds no address keeps its own.
pub(crate) async fn look(
    value: &Value,
    finder: &AddressFinder,
    with_flannel: bool,
    missing: &mut MissingAddresses,
    now: Instant,
) -> OwnAddresses {
    let mut look = OwnAddresses::default();
    for version in IpVersion::ALL {
        missing.unfound.remove(&version);
        let decision = match finder.find(version).await {
            Ok(Some(found)) => Decision::Write(found.to_string()),
            Ok(None) => decide(value, version, finder, with_flannel),
            Err(problem) => {
                missing.unfound.insert(version, problem);
                Decision::Unknown
            }
        };
        look.take(version, decision, missing, now);
    }
    look
}

impl OwnAddresses {
    fn take(&mut self, version: IpVersion, decision: Decision, known: &mut MissingAddresses, now: Instant) {
        let missing = match decision {
            Decision::Missing(missing) => missing,
            Decision::Unknown => {
                self.of_flannel.insert(version);
                return;
            }
            other => {
                known.update(version, None, now);
                if let Decision::Write(network) = other {
                    self.annotations.insert(own(version), Some(network));
                }
                return;
            }
        };
        let is_overdue = known.update(version, Some(&missing), now);
        if missing.is_of_flannel(version) && !is_overdue {
            self.of_flannel.insert(version);
        }
        if let Some(instead) = missing.instead.filter(|_| is_overdue) {
            tracing::warn!(address = %missing.address, %instead, "no interface has the node's address any more; Tortie announces another one");
            self.annotations.insert(own(version), Some(instead));
        }
    }
}

/// What should become of the annotation of a family, by what the kubelet reports and what interfaces have. Calico's agents and
/// administrators write some, too, so one that is there stays while an interface has its address.
fn decide(node: &Value, version: IpVersion, finder: &AddressFinder, with_flannel: bool) -> Decision {
    let current = &node["metadata"]["annotations"];
    let reported = internal_address(node, version);
    let with_length = |address: IpAddr| {
        finder
            .prefix_length(address)
            .map_or_else(|| address.to_string(), |length| format!("{address}/{length}"))
    };
    let Some(text) = current[own(version)].as_str() else {
        return match reported {
            Some(address) => Decision::Write(with_length(address)),
            None if with_flannel => left_by_flannel(current, version, finder),
            None => Decision::Keep,
        };
    };
    let Ok(address) = text.split('/').next().unwrap_or_default().parse::<IpAddr>() else {
        return Decision::Keep;
    };
    let is_bare = !text.contains('/');
    // By the full length, an administrator says that the node is alone in its network.
    let is_of_network = |net: &IpNet| net.prefix_len() < net.max_prefix_len();
    let has_other_length =
        text.parse().is_ok_and(|net: IpNet| is_of_network(&net) && finder.has_other_length(net));
    if has_other_length || is_bare && reported == Some(address) {
        return Decision::Write(with_length(address));
    }
    match finder.lacks(address) {
        Some(true) => {}
        Some(false) => return Decision::Keep,
        None => return Decision::Unknown,
    }
    let missing = |instead| Decision::Missing(Missing { address, name: own(version), instead });
    match reported {
        Some(other) if finder.prefix_length(other).is_some() => {
            let instead = with_length(other);
            // The interface is configured, so the address is not late: the machine has another one in its network.
            match instead.parse::<IpNet>().is_ok_and(|net| net.contains(&address)) {
                true => Decision::Write(instead),
                false => missing(Some(instead)),
            }
        }
        // Interfaces have neither address, as behind a router that translates them.
        Some(_) => Decision::Keep,
        None if IpVersion::ALL.into_iter().any(|version| internal_address(node, version).is_some()) => {
            missing(None)
        }
        // No kubelet reports anything.
        None => Decision::Keep,
    }
}

/// The address by which flannel's daemons reach the node, given its annotations and those that will change. As for flanneld, it
/// may be that of a router before the node.
pub(crate) fn own_address(
    current: &Value,
    changed: &BTreeMap<&str, Option<String>>,
    version: IpVersion,
) -> Option<String> {
    let overwritten = current[Node::FLANNEL_OVERWRITE.of(version)].as_str().map(str::to_owned);
    overwritten.or_else(|| {
        let known = || current[own(version)].as_str().map(str::to_owned);
        let address = changed.get(own(version)).cloned().unwrap_or_else(known)?;
        Some(address.split('/').next()?.to_owned())
    })
}

/// The address that flanneld has found on the node before, if an interface has it. Kubelets often report IPv4 only.
fn left_by_flannel(annotations: &Value, version: IpVersion, finder: &AddressFinder) -> Decision {
    let name = Node::FLANNEL_ADDRESS.of(version);
    let Some(address) = annotations[name].as_str().and_then(|text| text.parse().ok()) else {
        return Decision::Keep;
    };
    match finder.prefix_length(address) {
        Some(length) => Decision::Write(format!("{address}/{length}")),
        None => match finder.lacks(address) {
            Some(true) => Decision::Missing(Missing { address, name, instead: None }),
            Some(false) => Decision::Keep,
            None => Decision::Unknown,
        },
    }
}

/// The node's address as its kubelet reports it.
fn internal_address(node: &Value, version: IpVersion) -> Option<IpAddr> {
    let addresses = node["status"]["addresses"].as_array()?.iter();
    let internal = addresses.filter(|one| one["type"] == "InternalIP");
    let mut addresses = internal.filter_map(|one| one["address"].as_str()?.parse().ok());
    addresses.find(|address| IpVersion::of(address) == version)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::node_address::{AddressMethods, Machine};

    fn finder() -> AddressFinder {
        AddressFinder { methods: AddressMethods::default(), machine: Machine::Linux }
    }

    fn annotated(name: &str, text: Option<&str>, reported: &[&str]) -> Value {
        let reported = reported.iter().map(|address| json!({"type": "InternalIP", "address": address}));
        let addresses: Vec<Value> = reported.collect();
        json!({"metadata": {"annotations": {name: text}}, "status": {"addresses": addresses}})
    }

    /// CrossSubnet pools need it. Earlier agents wrote the address alone, and networks are divided.
    #[cfg(target_os = "linux")]
    #[test]
    fn the_address_has_the_prefix_length_of_its_interface() {
        let [v4, v6] = IpVersion::ALL;
        let write = |text: &str| Decision::Write(text.to_owned());
        for (version, current, reported, expected) in [
            (v4, None, &["127.0.0.1"][..], write("127.0.0.1/8")),
            (v4, Some("127.0.0.1"), &["127.0.0.1"], write("127.0.0.1/8")),
            (v4, Some("127.0.0.1/8"), &["127.0.0.1"], Decision::Keep),
            (v4, Some("127.0.0.1/16"), &["127.0.0.1"], write("127.0.0.1/8")),
            (v4, Some("127.0.0.1/32"), &["127.0.0.1"], Decision::Keep),
            (v4, Some("::1/128"), &["127.0.0.1"], Decision::Keep),
            (v4, Some("none"), &["127.0.0.1"], Decision::Keep),
            // The address of another interface, or of a family that the kubelet does not report.
            (v4, Some("127.0.0.1/8"), &["192.0.2.9"], Decision::Keep),
            (v4, Some("127.0.0.1/16"), &["192.0.2.9"], write("127.0.0.1/8")),
            (v4, Some("127.0.0.1/16"), &[], write("127.0.0.1/8")),
            (v4, Some("192.0.2.9/24"), &["192.0.2.9"], Decision::Keep),
            (v4, Some("192.0.2.9/24"), &["192.0.2.10"], Decision::Keep),
            // The machine has another address in the same network.
            (v4, Some("127.0.0.9/8"), &["127.0.0.1"], write("127.0.0.1/8")),
            (v6, None, &["127.0.0.1"], Decision::Keep),
            (v6, Some("2001:db8::1/64"), &[], Decision::Keep),
        ] {
            let node = annotated(own(version), current, reported);
            assert_eq!(decide(&node, version, &finder(), false), expected, "{current:?} {reported:?}");
        }
    }

    /// A machine that starts has its addresses later than its agent, and nobody would restore an annotation.
    #[cfg(target_os = "linux")]
    #[test]
    fn an_address_that_no_interface_has_is_kept_for_some_minutes() {
        let [v4, v6] = IpVersion::ALL;
        let flannel = Node::FLANNEL_ADDRESS.of(v6);
        let (start, minute) = (Instant::now(), Duration::from_secs(60));
        for (version, name, text, reported, replaced) in [
            (v4, Node::ADDRESS, "192.0.2.9/24", "127.0.0.1", Some("127.0.0.1/8")),
            // The kubelet knows no other one.
            (v6, Node::ADDRESS_V6, "2001:db8::1/64", "127.0.0.1", None),
            (v6, flannel, "2001:db8::1", "127.0.0.1", None),
        ] {
            let node = annotated(name, Some(text), &[reported]);
            let mut missing = MissingAddresses::default();
            let mut look = |node: &Value, minutes: u32| {
                let mut look = OwnAddresses::default();
                let decision = decide(node, version, &finder(), true);
                let now = start + minute * minutes;
                look.take(version, decision, &mut missing, now);
                // Pods get no addresses of a family in which nobody reaches the node.
                let is_given_up = minutes == 5 && replaced.is_none();
                assert_eq!(missing.given_up().contains(&version), is_given_up, "{text} {minutes}");
                assert_eq!(missing.need_looks(), !missing.since.is_empty() && !is_given_up);
                (look, missing.conditions())
            };
            for minutes in [0, 4] {
                let (OwnAddresses { annotations, of_flannel }, conditions) = look(&node, minutes);
                assert_eq!(annotations, BTreeMap::new(), "{text}");
                assert_eq!(of_flannel.contains(&version), name == flannel, "{text}");
                let [condition] = &conditions[..] else { panic!("{conditions:?}") };
                let address = text.split('/').next().unwrap();
                assert!(condition.message.contains(address) && condition.message.contains(name));
                assert_eq!(condition.reason, Reason::RouteRefused);
            }
            let (OwnAddresses { annotations, of_flannel }, _) = look(&node, 5);
            let expected = replaced.map(|text| (own(version), Some(text.to_owned())));
            assert_eq!(annotations, expected.into_iter().collect(), "{text}");
            assert!(of_flannel.is_empty());

            // It is back, and goes again.
            let back =
                annotated(own(version), Some(if version == v4 { "127.0.0.1/8" } else { "::1/128" }), &[]);
            assert_eq!(look(&back, 6).1, []);
            assert_eq!(look(&node, 7).0.annotations, BTreeMap::new(), "{text}");
        }
    }

    /// Interfaces that cannot be read say nothing about an address: it may still be missing, and what flannel has announced stays.
    #[cfg(target_os = "linux")]
    #[test]
    fn interfaces_that_cannot_be_read_change_nothing() {
        let [v4, _] = IpVersion::ALL;
        let (start, minute) = (Instant::now(), Duration::from_secs(60));
        let missing = Missing {
            address: "192.0.2.9".parse().unwrap(),
            name: own(v4),
            instead: Some("127.0.0.1/8".to_owned()),
        };
        let mut known = MissingAddresses::default();
        let mut take = |decision: Decision, minutes: u32| {
            let mut look = OwnAddresses::default();
            look.take(v4, decision, &mut known, start + minute * minutes);
            (look.annotations.len(), look.of_flannel.len())
        };
        assert_eq!(take(Decision::Missing(missing.clone()), 0), (0, 0));
        assert_eq!(take(Decision::Unknown, 1), (0, 1));
        assert_eq!(take(Decision::Missing(missing), 5), (1, 0), "the time goes on");
    }

    /// An address that no interface has is that of a router before the node, or an old one.
    #[test]
    fn the_address_that_flanneld_has_found_counts_if_an_interface_has_it() {
        let finder = finder();
        let name = Node::FLANNEL_ADDRESS.of(IpVersion::V4);
        for (annotation, expected) in [
            (json!("127.0.0.1"), Some("127.0.0.1/8")),
            (json!("192.0.2.9"), None),
            (json!("none"), None),
            (json!(null), None),
        ] {
            let annotations = json!({name: annotation});
            let found = match left_by_flannel(&annotations, IpVersion::V4, &finder) {
                Decision::Write(found) => Some(found),
                _ => None,
            };
            assert_eq!(found.as_deref(), expected, "{annotation}");
            assert_eq!(left_by_flannel(&annotations, IpVersion::V6, &finder), Decision::Keep);
        }
    }
}
