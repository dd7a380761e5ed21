//! HNS without Windows.
//!
//! [`Emulator`] answers the Host Compute Network API ([`tortie_hcn::Hcn`]): it keeps networks, endpoints, namespaces
//! and load balancers, checks every document strictly (HNS itself ignores unknown members, which hides typing
//! errors), and answers with HNS's error codes. [`Emulator::judge`] evaluates the ACLs of an endpoint for a packet.
//! It reads only the stored documents, so that the intention of a client and what it sent can be told apart.
//!
//! With a switch ([`Emulator::with_switch`], [`run_service`]; Linux only), the endpoints of overlay networks have
//! interfaces in network namespaces, and the switch forwards their frames: within the node, through VXLAN to other
//! nodes, subject to the ACLs, and from the addresses of load balancers to their backends.
//!
//! It is for tests and for the lab. Where HNS's behaviour is not documented or differs between builds, [`Config`] has
//! an option (docs/hns.md), and clients must be correct with every value.

mod acl;
mod addresses;
mod check;
#[cfg(target_os = "linux")]
mod compartments;
mod config;
mod containers;
mod counters;
mod emulator;
mod endpoints;
#[cfg(target_os = "linux")]
mod error;
#[cfg(target_os = "linux")]
mod fabric;
mod firewall;
mod flows;
mod guest_network_services;
mod host;
mod library;
mod load_balancers;
mod namespaces;
mod networks;
#[cfg(target_os = "linux")]
mod node_host;
mod policies;
mod policy_lists;
mod port_reservations;
mod recorder;
mod reply;
mod report;
mod restart;
mod sdn_routes;
#[cfg(target_os = "linux")]
mod service;
mod sets;
mod state;
#[cfg(target_os = "linux")]
mod switch;
mod v1;

pub use acl::{Packet, PacketDirection, Verdict};
#[cfg(target_os = "linux")]
pub use compartments::bind_compartment;
pub use config::{
    AclRemoval, Config, DefaultAction, EgressSees, EqualPriority, Limits, OnRewrite, SetReading, SeveralSets,
    UpdateReplaces,
};
pub use emulator::Emulator;
#[cfg(target_os = "linux")]
pub use error::Error;
pub use firewall::{EmulatedFirewall, FirewallState};
pub use host::{EmulatedHost, HostState};
pub use library::LibraryService;
#[cfg(target_os = "linux")]
pub use node_host::NodeHost;
pub use recorder::{Hold, Recorder};
pub use restart::{Survives, restart};
#[cfg(target_os = "linux")]
pub use service::{ServiceConfig, run_service};
