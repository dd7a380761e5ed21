//! Classes: pods, nodes and outsiders that no policy can distinguish.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use tortie_api::net::Direction;
use tortie_api::{Kind, Resource};

use super::applying::{Policies, Profile};
use super::atoms::{Uses, Vocabulary};
use super::class::{Class, ClassKind};
use super::criteria::Criteria;
use super::hosts::{ALL_INTERFACES, HostSignature};
use super::members::{addresses_in_use, of_nodes, of_outsiders, of_pods};
use super::names;
use super::path::{Placement, Scope, Stop};
use super::placement::{Ends, Placements};
use super::ports::Ports;
use super::signature::{EndSignature, SignatureIndex};
use tortie_oracle::{Oracle, Peer, Snapshot};

/// The classes of one cluster, or of one cluster before and after a change.
pub struct Classes {
    classes: Vec<Class>,
    ports: Ports,
    pub(super) criteria: Vec<Criteria>,
    /// The host endpoints of each cluster, without duplicates.
    hosts: Vec<Vec<HostSignature>>,
    placements: Placements,
    vocabulary: Vocabulary,
    policies: Policies,
    left_out: usize,
}

impl Classes {
    /// The classes of ends that no policy in any of the snapshots distinguishes. Several snapshots are one cluster at
    /// several times.
    #[must_use]
    pub fn of(snapshots: &[&Snapshot]) -> Self {
        Self::seen_by(snapshots, Policies::Enforced)
    }

    /// The classes of ends that no policy distinguishes, neither an enforced one nor a staged one.
    #[must_use]
    pub(crate) fn with_staged(snapshot: &Snapshot) -> Self {
        Self::seen_by(&[snapshot], Policies::All)
    }

    fn seen_by(snapshots: &[&Snapshot], policies: Policies) -> Self {
        let oracles: Vec<Oracle<'_>> = snapshots.iter().map(|snapshot| Oracle::new(snapshot)).collect();
        let oracles = oracles.as_slice();
        let mut vocabulary = Vocabulary::new(oracles);
        let criteria =
            oracles.iter().map(|oracle| Criteria::new(oracle, oracles, policies, &mut vocabulary)).collect();
        let (mut classes, left_out, hosts) = {
            let signature = |oracle| SignatureIndex::new(oracle, &vocabulary, policies);
            let mut signatures: Vec<SignatureIndex<'_>> = oracles.iter().map(signature).collect();
            let (mut classes, left_out) = of_pods(oracles, &mut signatures);
            classes.extend(of_nodes(oracles, &signatures));
            classes.extend(of_outsiders(oracles, &vocabulary, &signatures));
            let hosts: Vec<Vec<HostSignature>> =
                signatures.into_iter().map(SignatureIndex::into_hosts).collect();
            (classes, left_out, hosts)
        };
        names::give(&mut classes);
        classes.sort_by(|a, b| (a.kind, &a.name).cmp(&(b.kind, &b.name)));
        let ports = Ports::new(vocabulary.matchers.clone());
        let closed = |class: &Class| class.signatures.iter().flatten().any(|signature| signature.closed);
        let matter = hosts.iter().any(|hosts| !hosts.is_empty()) || classes.iter().any(closed);
        let placements = Placements::new(&classes, matter);
        Self { classes, ports, criteria, hosts, placements, vocabulary, policies, left_out }
    }

    /// The class of outsiders that contains the address, if no pod and no node has it; `snapshots` are those of the
    /// classes.
    #[must_use]
    pub fn class_of_outsider(&self, snapshots: &[&Snapshot], address: IpAddr) -> Option<usize> {
        let oracles: Vec<Oracle<'_>> = snapshots.iter().map(|snapshot| Oracle::new(snapshot)).collect();
        if addresses_in_use(&oracles).contains(&address) {
            return None;
        }
        let signature =
            |oracle| Some(SignatureIndex::new(oracle, &self.vocabulary, self.policies).outside(address));
        let seen: Vec<Option<EndSignature>> = oracles.iter().map(signature).collect();
        self.classes.iter().position(|class| class.kind == ClassKind::Outside && class.signatures == seen)
    }

    /// The classes: pods by name, then nodes, then outsiders.
    #[must_use]
    pub fn all(&self) -> &[Class] {
        &self.classes
    }

    /// The classes of protocols and ports.
    #[must_use]
    pub fn ports(&self) -> &Ports {
        &self.ports
    }

    /// Whether there are host endpoints at any time.
    #[must_use]
    pub fn with_hosts(&self) -> bool {
        self.hosts.iter().any(|hosts| !hosts.is_empty())
    }

    /// The number of pairs with a member of each class in this scope. A node that sends to one of its own pods does
    /// not count.
    pub(super) fn pairs(&self, from: usize, to: usize, scope: Scope) -> usize {
        let (Some(sender), Some(receiver)) = (self.classes.get(from), self.classes.get(to)) else { return 0 };
        let (senders, receivers) = (sender.members.len(), receiver.members.len());
        let all = senders * receivers - if from == to { senders } else { 0 };
        let probes = sender.kind == ClassKind::Nodes && receiver.kind == ClassKind::Pods;
        match scope.placement {
            None if !probes => all,
            None | Some(Placement::Apart) => {
                all - self.placements.pairs_together(sender, receiver, from == to)
            }
            Some(Placement::Together) => self.placements.pairs_together(sender, receiver, from == to),
        }
    }

    /// Where the pairs of the two classes are located.
    pub(super) fn ends(&self, from: usize, to: usize) -> Ends {
        self.classes.get(from).map(|sender| self.placements.ends((from, sender), to)).unwrap_or_default()
    }

    /// One member of each of the two classes: not the same member, and on different nodes with `apart`.
    pub(super) fn pair(&self, from: usize, to: usize, apart: bool) -> Option<(Peer, Peer)> {
        let (sender, receiver) = (self.classes.get(from)?, self.classes.get(to)?);
        super::placement::pair(sender, receiver, from == to, apart)
    }

    /// The criteria that the host endpoints of an end's node have for packets out of it or into it; `None` if its
    /// node has none.
    pub(super) fn uses_of_hosts(
        &self,
        signature: &EndSignature,
        world: usize,
        direction: Direction,
    ) -> Option<Uses> {
        let (criteria, hosts) = (self.criteria.get(world)?, self.hosts.get(world)?);
        let mut interfaces =
            signature.interfaces.iter().flatten().filter_map(|number| hosts.get(*number)).peekable();
        interfaces.peek()?;
        let mut uses = Uses::default();
        for host in interfaces {
            uses.add(&criteria.of_host(host, direction, signature.pod_policies.is_some()));
        }
        let all = signature.interfaces.get(ALL_INTERFACES).copied().flatten();
        if let Some(all) = all.and_then(|number| hosts.get(number)) {
            uses.add(&criteria.of_all_interfaces(all));
        }
        Some(uses)
    }

    /// The number of pods without an address, which are in no class.
    #[must_use]
    pub fn left_out(&self) -> usize {
        self.left_out
    }

    /// The class of an end of a flow.
    #[must_use]
    pub fn class_of(&self, peer: &Peer) -> Option<usize> {
        self.classes.iter().position(|class| class.members.contains(peer))
    }

    /// Whether different policies apply to the class at that stop before and after, if the policies themselves are
    /// unchanged.
    pub(super) fn asks_others(&self, class: usize, stop: Stop) -> bool {
        let Some([Some(was), Some(is)]) = self.classes.get(class).map(|class| class.signatures.as_slice())
        else {
            return false;
        };
        if !stop.is_host() {
            return was.pod_policies != is.pod_policies;
        }
        let hosts = |signature: &EndSignature, world: usize| {
            let hosts = self.hosts.get(world).map_or(&[][..], Vec::as_slice);
            signature.interfaces.map(|number| hosts.get(number?).cloned())
        };
        was.closed != is.closed || hosts(was, 0) != hosts(is, 1)
    }

    /// Whether one of these policies applies to the class at that stop, in the world with that number.
    pub(crate) fn has_say(&self, class: usize, stop: Stop, world: usize, policies: &BTreeSet<usize>) -> bool {
        let class = self.classes.get(class);
        let Some(signature) = class.and_then(|class| class.signatures.get(world)?.as_ref()) else {
            return false;
        };
        if stop.is_host() {
            let hosts = self.hosts.get(world).map_or(&[][..], Vec::as_slice);
            let interfaces = signature.interfaces.iter().flatten().filter_map(|number| hosts.get(*number));
            // The host endpoint of all interfaces also applies to packets from pods and to pods.
            let all = signature.interfaces.get(ALL_INTERFACES).copied().flatten();
            let all = all.and_then(|number| hosts.get(number)).into_iter();
            let inside =
                all.flat_map(|host| [Direction::Ingress, Direction::Egress].map(|of| host.all_policies(of)));
            let mut applying =
                interfaces.flat_map(|host| host.all_policies(stop.direction())).chain(inside.flatten());
            return applying.any(|index| policies.contains(&index));
        }
        let Some(pod_policies) = &signature.pod_policies else { return false };
        pod_policies.of(stop.direction()).iter().any(|index| policies.contains(index))
    }

    /// Whether the class has this profile at that stop.
    pub(crate) fn has_profile(&self, class: usize, stop: Stop, profile: &str) -> bool {
        let signature = self.classes.get(class).and_then(|class| class.signatures.first()?.as_ref());
        let is_it = |known: &Profile| matches!(known, Profile::Stored(name) if name == profile);
        let hosts = self.hosts.first().map_or(&[][..], Vec::as_slice);
        signature.is_some_and(|signature| match (stop.is_host(), &signature.pod_policies) {
            (false, Some(pod_policies)) => pod_policies.profiles.iter().any(is_it),
            // No profile applies to packets that a node forwards.
            (true, None) => {
                let interfaces =
                    signature.interfaces.iter().flatten().filter_map(|number| hosts.get(*number));
                interfaces.flat_map(|host| &host.profiles).any(is_it)
            }
            _ => false,
        })
    }

    /// The same cluster with only the representatives of the classes, and the pods that share an address with them.
    /// Their verdicts are the verdicts of all.
    #[must_use]
    pub fn reduced(&self, snapshot: &Snapshot) -> Snapshot {
        let samples = self.classes.iter().flat_map(|class| &class.samples);
        let mut pods: BTreeSet<(String, String)> = BTreeSet::new();
        for sample in samples {
            if let Peer::Pod { namespace, name } = &sample.peer {
                pods.insert((namespace.clone(), name.clone()));
            }
        }
        pods.extend(sharing(snapshot, &pods));
        snapshot.only(|key, stored| match key.kind {
            Kind::Pod => pods.contains(&(key.namespace.clone(), key.name.clone())),
            Kind::WorkloadEndpoint => match &stored.resource {
                Ok(Resource::WorkloadEndpoint(endpoint)) => {
                    pods.contains(&(key.namespace.clone(), endpoint.spec.pod.clone()))
                }
                _ => false,
            },
            kind => {
                kind.is_policy() || !matches!(kind, Kind::NodeReport | Kind::IpamBlock | Kind::IpamHandle)
            }
        })
    }
}

/// The pods that share an address with one of these.
fn sharing(snapshot: &Snapshot, pods: &BTreeSet<(String, String)>) -> BTreeSet<(String, String)> {
    let mut at: BTreeMap<IpAddr, BTreeSet<(String, String)>> = BTreeMap::new();
    for (key, stored) in snapshot.iter() {
        match &stored.resource {
            Ok(Resource::WorkloadEndpoint(endpoint)) => {
                for net in &endpoint.spec.ip_networks {
                    let pod = (key.namespace.clone(), endpoint.spec.pod.clone());
                    at.entry(net.addr()).or_default().insert(pod);
                }
            }
            Ok(Resource::Pod(pod)) => {
                if let Some(address) = pod.status.pod_ip {
                    at.entry(address).or_default().insert((key.namespace.clone(), key.name.clone()));
                }
            }
            _ => {}
        }
    }
    at.into_values()
        .filter(|there| there.len() > 1 && there.iter().any(|pod| pods.contains(pod)))
        .flatten()
        .collect()
}
