//! What is in force for an endpoint, for users: what is desired, and what the system has.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use tortie_api::net::Direction;
use tortie_policy::program::{PolicyId, PolicyRules, SetId};

use crate::{Endpoint, EndpointId, NodeState};

/// Why it cannot be shown.
#[derive(Debug, Clone, PartialEq, Eq, Error, Serialize, Deserialize)]
pub enum ShowError {
    /// The node has no such endpoint.
    #[error("{0} is no endpoint of this node")]
    NoEndpoint(String),
    /// The system did not answer, or does not have it.
    #[error("{object}: what is in force cannot be read: {problem}")]
    System {
        /// The endpoint.
        object: String,
        /// The problem and the remedy.
        problem: String,
    },
}

/// The desired policy of an endpoint, from the node state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AskedFor {
    /// The endpoint, with its program.
    pub endpoint: Endpoint,
    /// The rules of the policies and profiles that the program names; a missing one denies.
    pub policies: Vec<(PolicyId, PolicyRules)>,
    /// The number of members of the sets that the rules name.
    pub sets: BTreeMap<SetId, usize>,
}

impl AskedFor {
    /// The desired policy of the endpoint; `None` if the node has no such endpoint.
    #[must_use]
    pub fn of(state: &NodeState, id: &EndpointId) -> Option<Self> {
        let endpoint = state.endpoints.get(id)?;
        let mut policies: Vec<(PolicyId, PolicyRules)> = Vec::new();
        for policy in endpoint.program.policy_ids() {
            if let Some(rules) = state.policies.get(policy)
                && !policies.iter().any(|(there, _)| there == policy)
            {
                policies.push((policy.clone(), (**rules).clone()));
            }
        }
        let named = policies.iter().flat_map(|(_, rules)| rules.set_ids());
        let members = |id: &SetId| state.sets.get(id).map_or(0, |(_, members)| members.len());
        let sets = named.map(|id| (id.clone(), members(id))).collect();
        Some(Self { endpoint: (**endpoint).clone(), policies, sets })
    }
}

/// What the system has for an endpoint, as just read.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Shown {
    /// The source, such as `nftables table tortie, interface cali12345678901`.
    pub read_from: String,
    /// Whether rules count packets; absent if the system cannot.
    pub counting: Option<bool>,
    /// Lists of rules, in the order in which packets reach them.
    pub lists: Vec<ShownList>,
    /// The sets behind the names in the system's rules.
    pub sets: BTreeMap<String, SetId>,
    /// Differences, and other remarks for the user.
    pub remarks: Vec<String>,
}

/// A list of rules: a chain, or the ACLs of one direction.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShownList {
    /// Its name in the system.
    pub name: String,
    /// The direction of its packets.
    pub direction: Direction,
    /// Its purpose.
    pub part: ShownPart,
    /// A description, if its purpose is not a policy.
    pub words: String,
    /// The rules, in order.
    pub rules: Vec<ShownRule>,
}

/// The purpose of a list of rules.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ShownPart {
    /// For all endpoints, before policy.
    BeforePolicy,
    /// The endpoint's program, or a part of it.
    Program,
    /// A policy that programs share.
    Policy(PolicyId),
}

/// One rule of the system.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShownRule {
    /// The rule approximately in the system's own language.
    pub text: String,
    /// The system's comment, for users.
    pub comment: String,
    /// The policy that it comes from, if any.
    pub policy: Option<PolicyId>,
    /// The numbers of that policy's rules, counted from one; empty if unknown.
    pub numbers: Vec<usize>,
    /// Its count, if it counts.
    pub count: Option<Count>,
    /// The values of rules that were merged into this one.
    pub values: Vec<ShownValue>,
    /// Whether it differs from what Tortie wrote.
    pub differs: bool,
}

/// One value of a merged rule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShownValue {
    /// The value.
    pub text: String,
    /// Its count, if it counts.
    pub count: Option<Count>,
    /// The rules that it comes from, such as `NetworkPolicy shop/web Ingress rule 2`, as far as known.
    pub from: Vec<String>,
}

/// A count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Count {
    /// Packets.
    pub packets: u64,
    /// Bytes.
    pub bytes: u64,
}
