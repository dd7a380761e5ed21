//! Rules for routes, in the shape of Calico's BGPFilter (`api/pkg/apis/projectcalico/v3/bgpfilter.go`).

use std::sync::Arc;

use ipnet::IpNet;

use crate::codec::{AnyCommunity, AsPath, Attributes};

/// What the value of LOCAL_PREF is for a route of priority 0. Calico writes the metric of a kernel route as the
/// difference to it.
pub const HIGHEST_PREFERENCE: u32 = i32::MAX as u32;

/// How a rule compares the prefix of a route with its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MatchOperator {
    /// It is the same.
    Equal,
    /// It is another.
    NotEqual,
    /// It lies in it.
    In,
    /// It does not.
    NotIn,
}

/// A condition on the prefix of a route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefixMatch {
    /// The network.
    pub cidr: IpNet,
    /// The comparison.
    pub operator: MatchOperator,
    /// The shortest and the longest prefix for `In` and `NotIn`; also for the others, if given.
    pub lengths: Option<(u8, u8)>,
}

/// The conditions of a rule. All of them must hold.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Conditions {
    /// The prefix.
    pub prefix: Option<PrefixMatch>,
    /// Whether only routes that peers sent match (`source: RemotePeers`).
    pub only_from_peers: bool,
    /// Whether only own routes that lead to no interface match.
    pub only_static: bool,
    /// The name of the interface of a local route; `*` stands for any characters.
    pub interface: Option<String>,
    /// Whether the peer is internal (`peerType: iBGP`) or not.
    pub internal_peer: Option<bool>,
    /// A community that the route has.
    pub community: Option<AnyCommunity>,
    /// The first numbers of the path.
    pub as_path_prefix: Vec<u32>,
    /// The priority.
    pub priority: Option<u32>,
}

/// A change of a route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation {
    /// Adds a community.
    AddCommunity(AnyCommunity),
    /// Prepends these numbers, in this order, to the path.
    PrependAsPath(Vec<u32>),
    /// Sets the priority.
    SetPriority(u32),
}

/// What becomes of a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// It passes.
    Accept,
    /// It does not.
    Reject,
    /// The next rules decide, about the changed route.
    Continue,
}

/// A rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// What asks for it, for people.
    pub about: Arc<str>,
    /// The conditions.
    pub conditions: Conditions,
    /// What becomes of a route that matches.
    pub action: Action,
    /// How it changes before; nothing if it is rejected.
    pub operations: Vec<Operation>,
}

/// Rules in order. The first that matches and does not only change the route decides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// The rules.
    pub rules: Vec<Rule>,
    /// Whether a route passes about which no rule decides.
    pub accepts_others: bool,
}

/// A route before a policy.
#[derive(Debug, Clone, Copy)]
pub struct Candidate<'a> {
    /// Its prefix.
    pub prefix: &'a IpNet,
    /// Its attributes.
    pub attributes: &'a Attributes,
    /// Whether a peer sent it.
    pub from_peer: bool,
    /// The interface of a local route.
    pub interface: Option<&'a str>,
    /// Whether the peer of the policy is internal.
    pub internal_peer: bool,
}

/// What a policy says about a route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It passes as it is.
    Unchanged,
    /// It passes with these attributes.
    Changed(Box<Attributes>),
    /// It does not pass.
    Rejected,
}

impl Policy {
    /// Lets all routes pass.
    pub const ACCEPT: Self = Self { rules: Vec::new(), accepts_others: true };

    /// Judges a route.
    #[must_use]
    pub fn judge(&self, candidate: &Candidate<'_>) -> Verdict {
        self.judge_by(candidate).0
    }

    /// Judges a route, and names the rule that decides; `None` if no rule does.
    #[must_use]
    pub fn judge_by(&self, candidate: &Candidate<'_>) -> (Verdict, Option<&Rule>) {
        let mut changed: Option<Box<Attributes>> = None;
        let mut accepted = self.accepts_others;
        let mut by = None;
        for rule in &self.rules {
            let Rule { about: _, conditions, action, operations } = rule;
            let attributes = changed.as_deref().unwrap_or(candidate.attributes);
            if !conditions.hold(&Candidate { attributes, ..*candidate }) {
                continue;
            }
            if *action == Action::Reject {
                return (Verdict::Rejected, Some(rule));
            }
            if !operations.is_empty() {
                let attributes = changed.get_or_insert_with(|| Box::new(candidate.attributes.clone()));
                operations.iter().for_each(|operation| operation.apply(attributes));
            }
            if *action == Action::Accept {
                (accepted, by) = (true, Some(rule));
                break;
            }
        }
        let verdict = match changed {
            _ if !accepted => Verdict::Rejected,
            Some(attributes) => Verdict::Changed(attributes),
            None => Verdict::Unchanged,
        };
        (verdict, by)
    }
}

impl Conditions {
    fn hold(&self, candidate: &Candidate<'_>) -> bool {
        let Self {
            prefix,
            only_from_peers,
            only_static,
            interface,
            internal_peer,
            community,
            as_path_prefix,
            priority,
        } = self;
        let attributes = candidate.attributes;
        prefix.as_ref().is_none_or(|condition| condition.holds(candidate.prefix))
            && (!only_from_peers || candidate.from_peer)
            && (!only_static || !candidate.from_peer && candidate.interface.is_none())
            && interface
                .as_ref()
                .is_none_or(|pattern| candidate.interface.is_some_and(|name| matches(pattern, name)))
            && internal_peer.is_none_or(|internal| internal == candidate.internal_peer)
            && community.as_ref().is_none_or(|community| has(attributes, community))
            && starts_with(&attributes.as_path, as_path_prefix)
            && priority.is_none_or(|wanted| self::priority(attributes) == Some(wanted))
    }
}

impl PrefixMatch {
    fn holds(&self, prefix: &IpNet) -> bool {
        let fits = self.lengths.is_none_or(|(min, max)| (min..=max).contains(&prefix.prefix_len()));
        match self.operator {
            MatchOperator::Equal => *prefix == self.cidr && fits,
            MatchOperator::NotEqual => !(*prefix == self.cidr && fits),
            MatchOperator::In => self.cidr.contains(prefix) && fits,
            MatchOperator::NotIn => !(self.cidr.contains(prefix) && fits),
        }
    }
}

impl Operation {
    fn apply(&self, attributes: &mut Attributes) {
        match self {
            Self::AddCommunity(AnyCommunity::Standard(community)) => {
                if !attributes.communities.contains(community) {
                    attributes.communities.push(*community);
                }
            }
            Self::AddCommunity(AnyCommunity::Large(community)) => {
                if !attributes.large_communities.contains(community) {
                    attributes.large_communities.push(*community);
                }
            }
            Self::PrependAsPath(numbers) => {
                numbers.iter().rev().for_each(|number| attributes.as_path.prepend(*number));
            }
            Self::SetPriority(priority) => {
                attributes.local_pref = Some(HIGHEST_PREFERENCE.saturating_sub(*priority));
            }
        }
    }
}

fn has(attributes: &Attributes, community: &AnyCommunity) -> bool {
    match community {
        AnyCommunity::Standard(community) => attributes.communities.contains(community),
        AnyCommunity::Large(community) => attributes.large_communities.contains(community),
    }
}

/// The priority of a route, if its preference is one of Calico's.
#[must_use]
pub fn priority(attributes: &Attributes) -> Option<u32> {
    attributes.local_pref.and_then(|preference| HIGHEST_PREFERENCE.checked_sub(preference))
}

fn starts_with(path: &AsPath, numbers: &[u32]) -> bool {
    let mut of_path = path.numbers();
    numbers.iter().all(|number| of_path.next() == Some(*number))
}

/// Whether a name has the form of a pattern, in which `*` stands for any characters.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else { return pattern == name };
    let Some(mut name) = name.strip_prefix(first) else { return false };
    let parts: Vec<&str> = rest.split('*').collect();
    let Some((last, middle)) = parts.split_last() else { return true };
    for part in middle {
        let Some(at) = name.find(part) else { return false };
        name = &name[at + part.len()..];
    }
    name.ends_with(last)
}
