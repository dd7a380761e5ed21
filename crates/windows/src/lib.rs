//! The Windows dataplane: makes a node what its state says, through the Host Compute Network API.
//!
//! [`ensure_overlay`] makes the node's overlay network and gives what other nodes need to know of it. [`WindowsWiring`]
//! connects pods, closed from the first moment. [`WindowsDataplane`] puts their policy in force and keeps the routes to
//! other nodes.
//!
//! It is written against [`tortie_hcn::Hcn`] and compiled and tested on every system. Only `NotFound` codes mean that
//! an object is absent; after any other failure nothing is known, nothing is concluded, and the caller is asked to come
//! again (docs/hns.md, Changes).

mod acl;
mod cost;
mod dataplane;
mod endpoint;
mod error;
mod load_balancers;
mod overlay;
mod policing;
mod policy_sets;
mod routes;
mod show;
mod static_rules;
mod waits;
mod wiring;

pub use cost::{Because, Cost, Costing, PolicyCost, RuleCost, Saving, Tally, Way, Written};
pub use dataplane::WindowsDataplane;
pub use endpoint::endpoint_id;
pub use error::Error;
pub use overlay::{CurrentOverlay, Overlay, OverlaySpec, ensure_overlay};
pub use static_rules::{StaticRules, StaticRulesError};
pub use wiring::WindowsWiring;

/// The name of the overlay network, as Calico has it.
pub const NETWORK: &str = "Calico";
