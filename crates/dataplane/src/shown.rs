//! What is in force for an endpoint, for people: what it is asked for, and what the system has of it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use tortie_api::net::Direction;
use tortie_policy::program::{PolicyId, PolicyRules, SetId};

use crate::{Endpoint, EndpointId, NodeState};

/// Why it cannot be shown.
#[derive(Debug, Clone, PartialEq, Eq, Error, Serialize, Deserialize)]
pub enum ShowError {
    /// The node knows no such endpoint.
    #[error("{0} is no endpoint of this node")]
    NoEndpoint(String),
    /// The system did not answer, or does not have it.
    #[error("{object}: what is in force cannot be read: {problem}")]
    System {
        /// The endpoint.
        object: String,
        /// What is wrong, and what to do.
        problem: String,
    },
}

/// What an endpoint's packets are asked, as the node state has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AskedFor {
    /// The endpoint, with its program.
    pub endpoint: Endpoint,
    /// The rules of the policies and profiles that the program names; one that is not there denies.
    pub policies: Vec<(PolicyId, PolicyRules)>,
    /// How many members the sets have that the rules name.
    pub sets: BTreeMap<SetId, usize>,
}

impl AskedFor {
    /// What the endpoint is asked for; `None` where the node has none of that name.
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

/// What the system has for an endpoint, as it was just read from there.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Shown {
    /// Where it was read, such as `nftables table tortie, interface cali12345678901`.
    pub read_from: String,
    /// Whether rules count what they match; absent where the system cannot.
    pub counting: Option<bool>,
    /// Lists of rules, each of which is asked from its beginning, in the order in which packets come to them.
    pub lists: Vec<ShownList>,
    /// What the sets mean by whose names rules of the system ask for members.
    pub sets: BTreeMap<String, SetId>,
    /// What is not as it should be, and other things that the reader has to know.
    pub remarks: Vec<String>,
}

/// A list of rules: a chain, or the ACLs of one direction.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShownList {
    /// What the system knows it by.
    pub name: String,
    /// Of which packets it is asked.
    pub direction: Direction,
    /// What it is there for.
    pub part: ShownPart,
    /// What it does, in words, where that follows from no policy.
    pub words: String,
    /// The rules, in order.
    pub rules: Vec<ShownRule>,
}

/// What a list of rules is there for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ShownPart {
    /// What all endpoints' packets meet before policy.
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
    /// The rule in the system's own language, more or less.
    pub text: String,
    /// What the system has beside it, for people.
    pub comment: String,
    /// The policy that it comes from, if it is one.
    pub policy: Option<PolicyId>,
    /// The numbers of that policy's rules that it stands for, counted from one; empty where that is not known.
    pub numbers: Vec<usize>,
    /// What it has counted, if it counts.
    pub count: Option<Count>,
    /// The values of rules that were folded into this one.
    pub values: Vec<ShownValue>,
    /// Whether it is not what Tortie put there.
    pub differs: bool,
}

/// One value of a rule that stands for several.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShownValue {
    /// The value.
    pub text: String,
    /// What was counted for it, if it counts.
    pub count: Option<Count>,
    /// The rules that it comes from, such as `NetworkPolicy shop/web Ingress rule 2`, as far as that is known.
    pub from: Vec<String>,
}

/// What was counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Count {
    /// Packets.
    pub packets: u64,
    /// Bytes.
    pub bytes: u64,
}
