//! The criteria of each policy and each profile.

use std::collections::{BTreeMap, BTreeSet};

use tortie_api::net::{Direction, Protocol};
use tortie_api::{Kind, Resource};

use super::applying::{PodPolicies, Policies, Profile};
use super::atoms::{Uses, Vocabulary};
use super::hosts::HostSignature;
use tortie_oracle::{Oracle, SeenPolicy, SeenProfile, Stored, Table};

/// The criteria of each policy and each stored profile, for [`SignatureIndex`](super::signature::SignatureIndex)s with one vocabulary.
pub(super) struct Criteria {
    /// By the policy's index.
    policies: Vec<BothDirections>,
    /// The criteria that the policies with doNotTrack have for packets whose replies they judge; by the policy's
    /// index.
    of_replies: BTreeMap<usize, BothDirections>,
    profiles: BTreeMap<String, BothDirections>,
    /// The criteria that distinguish failsafe ports from others, on any node.
    failsafe: BothDirections,
    /// The criteria that decide whether a packet comes from a failsafe port of the other direction. Untracked policy
    /// is not evaluated for such packets; without untracked policy the criteria are empty.
    answers: BothDirections,
    /// Without connection tracking, pods answer other protocols than TCP only; without untracked policy the criteria are empty.
    is_tcp: Uses,
}

/// Ingress, then egress.
type BothDirections = [Uses; 2];

const DIRECTIONS: [Direction; 2] = [Direction::Ingress, Direction::Egress];

fn index_of(direction: Direction) -> usize {
    usize::from(direction == Direction::Egress)
}

impl Criteria {
    pub(super) fn new(
        oracle: &Oracle<'_>,
        all: &[Oracle<'_>],
        counting: Policies,
        vocabulary: &mut Vocabulary,
    ) -> Self {
        let (mut policies, mut of_replies) = (Vec::new(), BTreeMap::new());
        for (index, policy) in oracle.policies().enumerate() {
            let resource = policy.stored.resource.as_ref().ok().filter(|_| counting.count(&policy));
            let uses = of(all, &policy.name.namespace, resource, vocabulary);
            if resource.is_some_and(is_untracked) {
                let [ingress, egress] = &uses;
                let before = [egress, ingress].map(|of_reply| vocabulary.before_reply(of_reply));
                of_replies.insert(index, before);
            }
            policies.push(uses);
        }
        let of_pods = oracle.pods().flat_map(|pod| pod.profiles());
        let names: BTreeSet<&String> =
            of_pods.chain(oracle.hosts().flat_map(|host| host.profiles())).collect();
        let mut profiles = BTreeMap::new();
        for name in names {
            if let SeenProfile::Stored(Stored { resource, .. }) = oracle.profile_of(name) {
                profiles.insert(name.clone(), of(all, "", resource.as_ref().ok(), vocabulary));
            }
        }
        let nodes: BTreeSet<&str> = oracle.hosts().map(|host| host.node()).collect();
        let failsafe = DIRECTIONS.map(|direction| {
            let mut uses = Uses::default();
            for node in &nodes {
                uses.add(&vocabulary.failsafe(&oracle.failsafe_ports(node, direction)));
            }
            uses
        });
        // A policy that was not understood may be untracked.
        let is_unread = |policy: SeenPolicy<'_>| {
            policy.name.kind == Kind::GlobalNetworkPolicy.name() && policy.stored.resource.is_err()
        };
        let has_untracked = !of_replies.is_empty() || oracle.policies().any(is_unread);
        let [inbound, outbound] = &failsafe;
        let answers = match has_untracked {
            true => [outbound, inbound].map(|opposite| vocabulary.before_reply(opposite)),
            false => BothDirections::default(),
        };
        let is_tcp = if has_untracked { vocabulary.protocol(Protocol::TCP) } else { Uses::default() };
        Self { policies, of_replies, profiles, failsafe, answers, is_tcp }
    }

    /// The criteria of all policies and profiles that apply to a pod.
    pub(super) fn of_pod(&self, pod_policies: &PodPolicies, direction: Direction) -> Uses {
        let mut uses = Uses::default();
        self.add_policies(pod_policies.of(direction), direction, &mut uses);
        self.add_profiles(&pod_policies.profiles, direction, &mut uses);
        uses
    }

    /// The criteria of all tables of a host endpoint, for packets that its node forwards or for packets of the node
    /// itself.
    pub(super) fn of_host(&self, host: &HostSignature, direction: Direction, forwarded: bool) -> Uses {
        let mut uses = Uses::default();
        let own = if forwarded { Table::Forward } else { Table::Normal };
        self.add_policies(host.policies(own, direction), direction, &mut uses);
        if !forwarded {
            self.add_profiles(&host.profiles, direction, &mut uses);
        }
        if !forwarded || direction == Direction::Ingress {
            uses.add(&self.failsafe[index_of(direction)]);
            for table in [Table::Untracked, Table::PreDnat] {
                self.add_policies(host.policies(table, direction), direction, &mut uses);
            }
            if !host.policies(Table::Untracked, direction).is_empty() {
                uses.add(&self.answers[index_of(direction)]);
                uses.add(&self.is_tcp);
            }
            for of in DIRECTIONS {
                let untracked = host.policies(Table::Untracked, of).iter();
                let of_replies = untracked.filter_map(|index| self.of_replies.get(index));
                of_replies.for_each(|both| uses.add(&both[index_of(direction)]));
            }
        }
        uses
    }

    /// The criteria of a host endpoint of all interfaces, before DNAT and for packets that its node forwards.
    pub(super) fn of_all_interfaces(&self, host: &HostSignature) -> Uses {
        let mut uses = Uses::default();
        uses.add(&self.failsafe[index_of(Direction::Ingress)]);
        self.add_policies(host.policies(Table::PreDnat, Direction::Ingress), Direction::Ingress, &mut uses);
        for direction in DIRECTIONS {
            self.add_policies(host.policies(Table::Forward, direction), direction, &mut uses);
        }
        uses
    }

    fn add_policies(&self, policies: &[usize], direction: Direction, uses: &mut Uses) {
        let criteria = policies.iter().filter_map(|index| self.policies.get(*index));
        criteria.for_each(|both| uses.add(&both[index_of(direction)]));
    }

    fn add_profiles(&self, profiles: &[Profile], direction: Direction, uses: &mut Uses) {
        for profile in profiles {
            if let Profile::Stored(name) = profile
                && let Some(both) = self.profiles.get(name)
            {
                uses.add(&both[index_of(direction)]);
            }
        }
    }
}

/// The criteria of a policy or profile; none if it was not understood.
fn of(
    all: &[Oracle<'_>],
    namespace: &str,
    resource: Option<&Resource>,
    vocabulary: &mut Vocabulary,
) -> BothDirections {
    DIRECTIONS.map(|direction| match resource {
        Some(resource) => vocabulary.policy(all, namespace, resource, direction),
        None => Uses::default(),
    })
}

fn is_untracked(resource: &Resource) -> bool {
    match resource {
        Resource::GlobalNetworkPolicy(policy) | Resource::StagedGlobalNetworkPolicy(policy) => {
            policy.spec.do_not_track
        }
        _ => false,
    }
}
