//! Views: groups of classes that the policies at a stop do not distinguish, as their subjects or as their peers.

use std::collections::{BTreeSet, HashMap};
use std::num::NonZeroU32;
use std::rc::Rc;

use tortie_api::net::IpVersion;
use tortie_oracle::Subnet;

use super::{Decision, Judge};
use crate::applying::Profile;
use crate::atoms::Uses;
use crate::hosts::{ALL_INTERFACES, Interfaces};
use crate::path::{Spot, family_number};
use crate::signature::{AddressSignature, EndSignature, Holding, Overlaid};

/// The results at one stop for one family. Peers and ports that are not distinguished there form one group.
pub(super) struct View {
    pub(super) peers: Rc<Vec<usize>>,
    pub(super) ports: Vec<usize>,
    pub(super) port_samples: Vec<usize>,
    /// The results for each group of peers on all ports, after their evaluation.
    pub(super) rows: Vec<Option<Option<Row>>>,
}

/// The number of a list of results for all ports, from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in super::super) struct Row(NonZeroU32);

impl Row {
    pub(super) fn at(index: usize) -> Option<Self> {
        NonZeroU32::new(u32::try_from(index).ok()?.checked_add(1)?).map(Self)
    }

    pub(super) fn index(self) -> usize {
        usize::try_from(self.0.get()).unwrap_or(usize::MAX) - 1
    }
}

/// Everything that determines the results for a class at a stop. Classes with equal seats share a view.
#[derive(PartialEq, Eq, Hash)]
pub(super) struct Seat<'a> {
    /// The number of the spot.
    spot: usize,
    family: IpVersion,
    policies: StopPolicies<'a>,
    own: Restricted,
}

/// The policies that apply.
#[derive(PartialEq, Eq, Hash)]
enum StopPolicies<'a> {
    Pods {
        policies: &'a [usize],
        profiles: &'a [Profile],
    },
    /// The policies of host endpoints, for packets that their node forwards or for its own packets.
    Hosts {
        interfaces: Interfaces,
        forwarded: bool,
    },
}

/// The part of a signature for which some policies have criteria.
#[derive(PartialEq, Eq, Hash)]
struct Restricted {
    address: Option<AddressSignature>,
    tunnel: Option<AddressSignature>,
    ipip: Option<AddressSignature>,
    translated: Option<AddressSignature>,
    /// These select the address that the packet has, and the interface that it passes.
    overlaid: Overlaid,
    subnet: Subnet,
    anchored: bool,
    pooled: bool,
}

impl Restricted {
    fn new(signature: &EndSignature, family: IpVersion, atoms: &BTreeSet<u32>) -> Self {
        let holding = |all: &Holding| all.iter().filter(|number| atoms.contains(number)).copied().collect();
        let address = |signature: &AddressSignature| AddressSignature {
            holding: holding(&signature.holding),
            present: signature.present.iter().map(holding).collect(),
        };
        let routed = signature.by(family);
        Self {
            address: routed.map(|routed| address(&routed.address)),
            tunnel: signature.tunnel(family).map(address),
            ipip: signature.ipip.as_ref().filter(|_| family == IpVersion::V4).map(address),
            translated: routed.and_then(|routed| routed.translated.as_ref()).map(address),
            overlaid: routed.map(|routed| routed.overlaid).unwrap_or_default(),
            subnet: signature.subnet.clone(),
            anchored: signature.anchored,
            pooled: routed.is_some_and(|routed| routed.pooled),
        }
    }
}

impl<'a> Judge<'a> {
    /// The number of the results for `peer` on all ports.
    pub(super) fn row(&mut self, subject: usize, peer: usize, spot: Spot, family: IpVersion) -> Option<Row> {
        let number = self.view(subject, spot, family)?;
        let view = self.views.get(number)?;
        let group = *view.peers.get(peer)?;
        if let Some(known) = view.rows.get(group)? {
            return *known;
        }
        let (from, to) = spot.stop.sender_and_receiver(subject, peer);
        let decisions: Vec<Option<Decision>> = view
            .port_samples
            .clone()
            .into_iter()
            .map(|port| self.ask(from, to, port, spot, family))
            .collect();
        let view = self.views.get(number)?;
        let decisions = view.ports.iter().map(|group| decisions.get(*group).copied().flatten()).collect();
        let row = self.row_number(decisions);
        *self.views.get_mut(number)?.rows.get_mut(group)? = Some(row);
        row
    }

    /// The number of the view of a class; `None` if no policy applies to it there.
    pub(super) fn view(&mut self, subject: usize, spot: Spot, family: IpVersion) -> Option<usize> {
        let stop = spot.stop;
        if stop.is_host() && !self.classes.with_hosts() {
            return None;
        }
        let slot = |all: &[[Option<usize>; 2]; Spot::COUNT]| {
            all.get(spot.number())?.get(family_number(family)).copied()
        };
        if let Some(known) = self.view_of.get(subject).and_then(slot)? {
            return Some(known);
        }
        let signature = self.signature(subject)?;
        if spot.is_inside_node()
            && (signature.pod_policies.is_none()
                || signature.interfaces.get(ALL_INTERFACES).is_none_or(Option::is_none))
        {
            return None;
        }
        let criteria = self.classes.criteria.get(self.world)?;
        let (policies, uses) = match stop.is_host() {
            true => {
                let uses = self.classes.uses_of_hosts(signature, self.world, stop.direction())?;
                let forwarded = signature.pod_policies.is_some();
                (StopPolicies::Hosts { interfaces: signature.interfaces, forwarded }, uses)
            }
            false => {
                let pod_policies = signature.pod_policies.as_ref()?;
                let policies = pod_policies.of(stop.direction());
                let uses = criteria.of_pod(pod_policies, stop.direction());
                (StopPolicies::Pods { policies, profiles: &pod_policies.profiles }, uses)
            }
        };
        let own = Restricted::new(signature, family, &uses.atoms);
        let seat = Seat { spot: spot.number(), family, policies, own };
        let number = match self.seats.get(&seat) {
            Some(known) => *known,
            None => {
                let number = self.new_view(uses, family);
                self.seats.insert(seat, number);
                number
            }
        };
        *self.view_of.get_mut(subject)?.get_mut(spot.number())?.get_mut(family_number(family))? =
            Some(number);
        Some(number)
    }

    fn new_view(&mut self, uses: Uses, family: IpVersion) -> usize {
        let (ports, port_samples) = self.classes.ports().groups(&uses.matchers);
        let peers = self.groups(family, uses.atoms);
        let rows = vec![None; peers.iter().max().map_or(0, |last| last + 1)];
        self.views.push(View { peers, ports, port_samples, rows });
        self.views.len() - 1
    }

    /// The number of the group of each class, with groups that these criteria distinguish.
    fn groups(&mut self, family: IpVersion, atoms: BTreeSet<u32>) -> Rc<Vec<usize>> {
        let key = (family, atoms);
        if let Some(known) = self.groups.get(&key) {
            return known.clone();
        }
        let mut numbers: HashMap<Option<Restricted>, usize> = HashMap::new();
        let groups = (0..self.classes.all().len()).map(|class| {
            let seen = self.signature(class).map(|signature| Restricted::new(signature, family, &key.1));
            let next = numbers.len();
            *numbers.entry(seen).or_insert(next)
        });
        let groups = Rc::new(groups.collect::<Vec<usize>>());
        self.groups.insert(key, groups.clone());
        groups
    }
}
