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
use crate::node_address::{AddressFinder, has_network};

/// How long an address is missing on all interfaces before another one replaces it. Interfaces have no addresses for a moment
/// when a machine starts, and when somebody configures them anew.
const PATIENCE: Duration = Duration::from_secs(5 * 60);
/// The patience for an address that the operator's method finds on an interface with another network.
const SHORT_PATIENCE: Duration = Duration::from_secs(30);
/// The time for which the node reports that its address has changed.
const NEWS: Duration = Duration::from_secs(10 * 60);

/// The annotation of the node's own address of a family.
const fn own(version: IpVersion) -> &'static str {
    match version {
        IpVersion::V4 => Node::ADDRESS,
        IpVersion::V6 => Node::ADDRESS_V6,
    }
}

/// The annotation with what the agent has written to [`own`] itself.
const fn record(version: IpVersion) -> &'static str {
    match version {
        IpVersion::V4 => Node::ANNOUNCED,
        IpVersion::V6 => Node::ANNOUNCED_V6,
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
    /// The agent announces this address.
    Write(String),
    /// The address that somebody else has written gets the right length of its prefix. It stays theirs.
    Correct(String),
    Missing(Missing),
    /// The address that somebody else has written stays, and the kubelet reports this address, which an interface has.
    Differs {
        announced: String,
        reported: String,
    },
}

/// An address in an annotation that no interface has.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Missing {
    address: IpAddr,
    /// The annotation.
    name: &'static str,
    /// What replaces it if it stays away. Otherwise nobody knows another one.
    instead: Option<String>,
    /// When it is replaced.
    patience: Duration,
}

/// The addresses in annotations that no interface has, with the times since which they have been missing.
#[derive(Debug, Default)]
pub(crate) struct MissingAddresses {
    since: BTreeMap<IpVersion, (Missing, Instant)>,
    /// The families whose addresses had been missing for long at the last look.
    overdue: BTreeSet<IpVersion>,
    /// The families in which the method of the operator finds no address, and why. The annotation stays.
    unfound: BTreeMap<IpVersion, String>,
    /// The families in which something else than the announced address may be meant.
    differing: BTreeMap<IpVersion, String>,
    /// The families whose address Calico's node agent writes, which may end without a change of the Node.
    beside_calico: BTreeSet<IpVersion>,
    /// The addresses that have changed a short time ago, with what the node reports of that.
    changed: BTreeMap<IpVersion, (String, Instant)>,
}

impl MissingAddresses {
    /// Takes note of what the node announces instead of another address. The attempt to write it may be repeated.
    fn note_change(&mut self, version: IpVersion, text: String, now: Instant) {
        if self.changed.get(&version).is_none_or(|(known, _)| *known != text) {
            tracing::warn!("{text}");
            self.changed.insert(version, (text, now));
        }
    }

    /// Ingests what is missing of a family now. Returns whether it has been missing for long.
    fn update(&mut self, version: IpVersion, found: Option<&Missing>, now: Instant) -> bool {
        let former = self.since.remove(&version);
        self.overdue.remove(&version);
        let Some(missing) = found else { return false };
        let former = former.filter(|(former, _)| former.address == missing.address);
        let since = former.map_or(now, |(_, since)| since);
        self.since.insert(version, (missing.clone(), since));
        let is_overdue = now.saturating_duration_since(since) >= missing.patience;
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

    /// Returns true if the interfaces should be looked at at each tick, also to end what is reported for some time only. An address that has
    /// been given up may return too, and is looked at with the next change of the Node, which kubelets report every few minutes.
    pub(crate) fn need_looks(&self) -> bool {
        self.since.len() > self.given_up().len() || !self.changed.is_empty() || !self.beside_calico.is_empty()
    }

    /// The conditions of the node.
    pub(crate) fn conditions(&self) -> Vec<Condition> {
        let missing = self.since.iter().map(|(version, (missing, _))| missing.condition(*version));
        let unfound = self.unfound.iter().map(|(version, problem)| {
            let message = format!("{problem}. What the node has announced for {version} stays");
            Condition::new(Reason::NetworkPartNotInForce, message)
        });
        let differing = self.differing.values();
        let differing = differing.map(|text| Condition::new(Reason::NodeAddressDiffers, text.clone()));
        let changed = self.changed.values();
        let changed = changed.map(|(text, _)| Condition::new(Reason::NodeAddressChanged, text.clone()));
        missing.chain(unfound).chain(differing).chain(changed).collect()
    }
}

impl Missing {
    fn is_of_flannel(&self, version: IpVersion) -> bool {
        self.name == Node::FLANNEL_ADDRESS.of(version)
    }

    fn condition(&self, version: IpVersion) -> Condition {
        let Self { address, name, instead, patience } = self;
        let patience = match patience.as_secs() {
            seconds if seconds < 60 => format!("{seconds} seconds"),
            seconds => format!("{} minutes", seconds / 60),
        };
        let next = match instead {
            _ if self.is_of_flannel(version) => {
                format!(
                    "if it stays away, Tortie removes what flannel has announced for {version} after {patience}"
                )
            }
            Some(instead) => format!("if it stays away, {instead} replaces it after {patience}"),
            None => {
                format!(
                    "the kubelet reports no {version} address that an interface has, so the annotation stays"
                )
            }
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
    missing.changed.retain(|_, (_, since)| now.saturating_duration_since(*since) < NEWS);
    for version in IpVersion::ALL {
        missing.unfound.remove(&version);
        let known = Known::of(value, version);
        let decision = match finder.find(version, known.address()).await {
            Ok(Some(found)) => of_method(&known, found, version, finder),
            Ok(None) => decide(value, version, finder, with_flannel),
            Err(problem) => {
                missing.unfound.insert(version, problem);
                Decision::Unknown
            }
        };
        look.take(version, decision, missing, now);
        look.settle(version, &known, finder, missing, now);
    }
    look
}

/// The annotations of a Node about its address of a family.
struct Known<'a> {
    text: Option<&'a str>,
    /// The agent's own record of what it has written.
    record: Option<&'a str>,
}

impl<'a> Known<'a> {
    fn of(node: &'a Value, version: IpVersion) -> Self {
        let annotations = &node["metadata"]["annotations"];
        Self { text: annotations[own(version)].as_str(), record: annotations[record(version)].as_str() }
    }

    fn address(&self) -> Option<IpAddr> {
        address_in(self.text?)
    }

    /// Returns true if the agent has written the address, and nobody has changed it since.
    fn is_own(&self) -> bool {
        self.text.is_some() && self.text == self.record
    }
}

/// The address in the text of an annotation, which may have the length of a prefix.
fn address_in(text: &str) -> Option<IpAddr> {
    text.split('/').next()?.parse().ok()
}

/// Decides about the annotation, if the operator's method finds this address. A network service may be about to restore the announced one, and
/// an address of another interface would stay then. The only one that is left may also be that of a service which moves between machines.
fn of_method(known: &Known<'_>, found: IpNet, version: IpVersion, finder: &AddressFinder) -> Decision {
    let announced = known.text.and_then(|text| text.parse::<IpNet>().ok());
    let late = announced.filter(|net| {
        let is_near = has_network(net) && has_network(&found) && net.contains(&found.addr());
        !is_near && finder.lacks(net.addr()) == Some(true)
    });
    let Some(net) = late else { return Decision::Write(found.to_string()) };
    let have_networks = has_network(&net) && has_network(&found);
    let patience = if have_networks { SHORT_PATIENCE } else { PATIENCE };
    let instead = Some(found.to_string());
    Decision::Missing(Missing { address: net.addr(), name: own(version), instead, patience })
}

impl OwnAddresses {
    fn take(&mut self, version: IpVersion, decision: Decision, known: &mut MissingAddresses, now: Instant) {
        known.differing.remove(&version);
        known.beside_calico.remove(&version);
        let missing = match decision {
            Decision::Missing(missing) => missing,
            Decision::Unknown => {
                self.of_flannel.insert(version);
                return;
            }
            other => {
                known.update(version, None, now);
                match other {
                    Decision::Write(network) => self.write(version, network),
                    Decision::Correct(network) => {
                        self.annotations.insert(own(version), Some(network));
                    }
                    Decision::Differs { announced, reported } => {
                        known.differing.insert(version, differing(version, &announced, &reported));
                    }
                    Decision::Keep | Decision::Unknown | Decision::Missing(_) => {}
                }
                return;
            }
        };
        let is_overdue = known.update(version, Some(&missing), now);
        if missing.is_of_flannel(version) && !is_overdue {
            self.of_flannel.insert(version);
        }
        if let Some(instead) = missing.instead.filter(|_| is_overdue) {
            self.write(version, instead);
        }
    }

    fn write(&mut self, version: IpVersion, network: String) {
        self.annotations.insert(record(version), Some(network.clone()));
        self.annotations.insert(own(version), Some(network));
    }

    /// Completes what changes: Calico's agent writes the addresses of its node itself, a record of something that is not there any more
    /// goes, and the operator learns of another address.
    fn settle(
        &mut self,
        version: IpVersion,
        known: &Known<'_>,
        finder: &AddressFinder,
        missing: &mut MissingAddresses,
        now: Instant,
    ) {
        let new = self.annotations.get(own(version)).cloned().flatten();
        let Some(new) = new.filter(|new| known.text != Some(new.as_str())) else {
            if known.record.is_some() && !known.is_own() {
                self.annotations.entry(record(version)).or_insert(None);
            }
            return;
        };
        // The first address is needed by everything, whoever writes it.
        if let Some(sign) = finder.machine.sign_of_calico().filter(|_| known.text.is_some()) {
            self.annotations.remove(own(version));
            self.annotations.remove(record(version));
            let text = format!(
                "Calico's node agent runs here ({sign}) and writes the node's addresses, so Tortie does not write {new} to the annotation {}; \
                 remove Calico's agent from this node, or let it write that address",
                own(version)
            );
            missing.differing.insert(version, text);
            missing.beside_calico.insert(version);
            return;
        }
        let Some(old) = known.text.filter(|old| address_in(old) != address_in(&new)) else { return };
        let method = finder.methods.of(version);
        let found = match method.asks_the_machine() {
            true => format!("the method {method} finds it"),
            false => "the kubelet reports it".to_owned(),
        };
        let gone = match known.address().and_then(|address| finder.lacks(address)) {
            Some(true) => ", and no interface has the former one",
            _ => "",
        };
        let text = format!(
            "the node is to announce {new} instead of {old} (annotation {}): {found}{gone}. Packets of other nodes may be lost for some seconds",
            own(version)
        );
        missing.note_change(version, text, now);
    }
}

fn differing(version: IpVersion, announced: &str, reported: &str) -> String {
    let name = own(version);
    format!(
        "the node announces {announced}, and the kubelet reports {reported}, which an interface has, too. The annotation {name} decides, because \
         the agent has no record that it wrote it itself: an administrator, Calico's agent or an earlier version of Tortie has. If the kubelet \
         is right, remove the annotation: kubectl annotate node NODE {name}-"
    )
}

/// Decides about the annotation of a family, by what the kubelet reports and what interfaces have. Calico's agents and
/// administrators write some, too, so one that is there stays while an interface has its address. What the agent has written itself follows
/// the kubelet.
fn decide(node: &Value, version: IpVersion, finder: &AddressFinder, with_flannel: bool) -> Decision {
    let current = &node["metadata"]["annotations"];
    let reported = internal_addresses(node, version);
    let with_length = |address: IpAddr| {
        finder
            .prefix_length(address)
            .map_or_else(|| address.to_string(), |length| format!("{address}/{length}"))
    };
    let known = Known::of(node, version);
    let Some(text) = known.text else {
        return match reported.first() {
            Some(address) => Decision::Write(with_length(*address)),
            None if with_flannel => left_by_flannel(current, version, finder),
            None => Decision::Keep,
        };
    };
    let Some(address) = known.address() else { return Decision::Keep };
    // A router in front of the node may have the first one.
    let other = reported.iter().find(|other| finder.prefix_length(**other).is_some());
    let other = other.filter(|_| !reported.contains(&address)).map(|other| with_length(*other));
    // The kubelet may report the address of a service that moves between machines, too.
    let has_moved = |other: &str| {
        let of = |text: &str| text.parse::<IpNet>().is_ok_and(|net| has_network(&net));
        of(other) || !of(text) || finder.lacks(address) == Some(true)
    };
    if known.is_own()
        && let Some(other) = other.as_ref().filter(|other| has_moved(other))
    {
        return Decision::Write(other.clone());
    }
    let has_other_length =
        text.parse().is_ok_and(|net: IpNet| has_network(&net) && finder.has_other_length(net));
    // By the full length, an administrator says that the node is alone in its network.
    if has_other_length || !text.contains('/') && reported.contains(&address) {
        let corrected = with_length(address);
        return if known.is_own() { Decision::Write(corrected) } else { Decision::Correct(corrected) };
    }
    let differs = |reported| Decision::Differs { announced: text.to_owned(), reported };
    match finder.lacks(address) {
        Some(true) => {}
        Some(false) => {
            let is_of_family = IpVersion::of(&address) == version;
            return other.filter(|_| is_of_family && !known.is_own()).map_or(Decision::Keep, differs);
        }
        None => return Decision::Unknown,
    }
    let missing =
        |instead| Decision::Missing(Missing { address, name: own(version), instead, patience: PATIENCE });
    match other {
        // The interface is configured, so the address is not late: the machine has another one in its network.
        Some(instead) if instead.parse::<IpNet>().is_ok_and(|net| net.contains(&address)) => {
            Decision::Write(instead)
        }
        Some(instead) => missing(Some(instead)),
        // The agent has written it while an interface had it.
        None if !reported.is_empty() && known.is_own() => missing(None),
        // Interfaces have neither address, as behind a router that translates them.
        None if !reported.is_empty() => Decision::Keep,
        None if IpVersion::ALL.into_iter().any(|version| !internal_addresses(node, version).is_empty()) => {
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
            Some(true) => Decision::Missing(Missing { address, name, instead: None, patience: PATIENCE }),
            Some(false) => Decision::Keep,
            None => Decision::Unknown,
        },
    }
}

/// The node's addresses of a family, as its kubelet reports them. In etcd, the controllers copy them to `spec`, as Calico's do.
fn internal_addresses(node: &Value, version: IpVersion) -> Vec<IpAddr> {
    let listed = [&node["status"], &node["spec"]].map(|part| part["addresses"].as_array());
    let addresses = listed.into_iter().flatten().flatten();
    let internal = addresses.filter(|one| one["type"] == "InternalIP");
    let addresses = internal.filter_map(|one| one["address"].as_str()?.parse().ok());
    addresses.filter(|address| IpVersion::of(address) == version).collect()
}

#[cfg(test)]
mod tests;
