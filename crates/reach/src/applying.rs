//! The policies and profiles that apply to an end of a packet.

use tortie_api::net::Direction;
use tortie_oracle::{Oracle, SeenPolicy, SeenProfile};

/// The policies that distinguish ends and packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Policies {
    /// Enforced policies.
    Enforced,
    /// Enforced and staged policies.
    All,
}

impl Policies {
    pub(super) fn count(self, policy: &SeenPolicy<'_>) -> bool {
        self == Self::All || !policy.staged
    }
}

/// The policies and profiles that apply to a pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(super) struct PodPolicies {
    pub(super) ingress: Vec<usize>,
    pub(super) egress: Vec<usize>,
    pub(super) profiles: Vec<Profile>,
}

impl PodPolicies {
    pub(super) fn of(&self, direction: Direction) -> &[usize] {
        match direction {
            Direction::Ingress => &self.ingress,
            Direction::Egress => &self.egress,
        }
    }
}

/// A profile of a pod or a host endpoint.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Profile {
    Stored(String),
    /// The profile of an existing namespace.
    AllowsAll,
    /// A profile that does not exist, and denies.
    Missing,
}

/// The profiles that have rules, up to the first that decides about every packet.
pub(super) fn profiles(oracle: &Oracle<'_>, names: &[String]) -> Vec<Profile> {
    let mut all = Vec::new();
    for name in names {
        match oracle.profile_of(name) {
            SeenProfile::Stored(_) => all.push(Profile::Stored(name.clone())),
            SeenProfile::WithoutRules => {}
            SeenProfile::AllowsAll => {
                all.push(Profile::AllowsAll);
                break;
            }
            SeenProfile::Missing => {
                all.push(Profile::Missing);
                break;
            }
        }
    }
    all
}
