//! Reasons of conditions and their severity.

use std::fmt;

use serde::de::IntoDeserializer;
use serde::de::value::Error;
use serde::{Deserialize, Serialize};

/// How severe a condition is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    /// Policy is in force, possibly narrower than requested; or something of somebody else needs attention. It delays no revision, no ADD and no `apply --wait`.
    Information,
    /// A stored object has no effect, or another one than it says. It delays nothing either, but nobody may call the
    /// object in force.
    WithoutEffect,
    /// Pods of this node and those of other nodes may not reach each other. It is no failure: policy is in force, and pods can be
    /// added and connect to others of the node. So it delays no position, no ADD and no policy, and neither `/readyz` nor liveness
    /// depends on it: one dead peer would otherwise stop the rollout that repairs it. It sets `tortie_connected`, the status of the
    /// node, and the exit codes of `tortie status` and `apply --wait`.
    Unreachable,
    /// The object of the condition is not in force; the dataplane retries.
    Failure,
}

impl Severity {
    /// The severity of a reason by its name in a node report. An unknown name is a failure, because the report may
    /// come from a newer agent.
    #[must_use]
    pub fn of(reason: &str) -> Self {
        let known: Result<Reason, Error> = Reason::deserialize(reason.into_deserializer());
        known.map_or(Self::Failure, Reason::severity)
    }

    /// The name in metrics.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Information => "information",
            Self::WithoutEffect => "without_effect",
            Self::Unreachable => "unreachable",
            Self::Failure => "failure",
        }
    }
}

/// Why a condition is reported: a short, stable name in CamelCase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Reason {
    /// The overlay network is on another adapter than the operator names.
    AdapterDiffers,
    /// The network adapter for the overlay cannot be used.
    AdapterNotUsable,
    /// The dataplane does not serve an address of the pod.
    AddressNotServed,
    /// The address for probes and metrics is in use.
    AddressTaken,
    /// A route of BGP is not in the kernel. If pods have no route then, [`Reason::BlockUnreachable`] says so.
    BgpRouteNotInForce,
    /// There is no session with a BGP peer. Others may give the same routes; if none does, [`Reason::BlockUnreachable`] says so.
    BgpSessionDown,
    /// A part of the BGP configuration has no effect.
    BgpSettingNotInForce,
    /// A Windows node may have more pods than its blocks have addresses.
    BlocksTooSmall,
    /// This node cannot route to blocks of another node, and should.
    BlockUnreachable,
    /// Calico left something on the node.
    CalicoLeftover,
    /// A version of Calico that Tortie does not know used the datastore.
    CalicoVersionUnknown,
    /// A load balancer hides the client's address from policy.
    ClientAddressHidden,
    /// The configuration for the container runtime cannot be written.
    CniConfigNotWritten,
    /// The node's connection tracking is nearly full.
    ConnectionsNearLimit,
    /// The datastore is locked, so its changes are not applied.
    DatastoreLocked,
    /// An object of HNS is not as required.
    Differs,
    /// HNS has no endpoint for a pod.
    EndpointMissing,
    /// A field of an object of the datastore has no effect.
    FieldNotSupported,
    /// The firewall of a Windows node may drop VXLAN packets of other nodes, or connections of BGP peers: Windows drops what no rule
    /// admits.
    FirewallNotOpen,
    /// Somebody else put ACLs on an endpoint.
    ForeignAcl,
    /// A chain of somebody else may drop packets that policy allows.
    ForeignChainMayDrop,
    /// Chains of somebody else cannot be read.
    ForeignChainsUnknown,
    /// A VXLAN link of somebody else uses the overlay's port or identifier.
    ForeignVxlanLink,
    /// HNS reported success and did something else.
    HnsDidNotTake,
    /// HNS refused a call.
    HnsRefused,
    /// HNS does not answer.
    HnsUnavailable,
    /// Host endpoints are not enforced on this operating system.
    HostEndpointNotEnforced,
    /// No interface of the node fits a host endpoint.
    HostEndpointWithoutInterface,
    /// The operating system does not serve a port of the node for a pod.
    HostPortNotServed,
    /// Another pod has the port of the node that a pod wants.
    HostPortTaken,
    /// A route of the adapter that the overlay network took over is not back. It may be the way to other nodes.
    HostRouteMissing,
    /// A rule matches ICMP types, which the operating system cannot match. The rule is narrowed if it allows, and
    /// widened if it denies.
    IcmpTypeNotExpressible,
    /// A further interface of a pod is closed.
    InterfaceClosed,
    /// Two pods claim one interface.
    InterfaceContested,
    /// The pod's interface does not exist.
    InterfaceMissing,
    /// Nothing proves that an interface is the pod's, or it is another pod's.
    InterfaceUnproven,
    /// The kernel lacks a module; what needs it is left out.
    KernelModuleMissing,
    /// The datastore does not have a kind of object: its objects cannot exist.
    KindAbsent,
    /// The agent cannot read a kind of object. What it knows of the kind stays in force.
    KindForbidden,
    /// The node has a block for which its overlay network has no subnet, so the pods with its addresses are not connected.
    MoreThanOneBlock,
    /// The network exists with other properties, and is in use.
    NetworkDiffers,
    /// The network does not exist.
    NetworkMissing,
    /// Routes, links or addresses are not as required, those of the node's own pods included. So it is a failure: a pod that is added
    /// now may have no route.
    NetworkNotInForce,
    /// HNS has not finished the network.
    NetworkNotReady,
    /// A part of the node's network is not as required, and packets between pods of nodes do not depend on it.
    NetworkPartNotInForce,
    /// The network of a Windows node has no subnet for the node's IPv6 block, so its pods have IPv4 addresses only.
    NetworkWithoutIpv6,
    /// The node announces another address of its own than a short time ago.
    NodeAddressChanged,
    /// The node announces another address of its own than its kubelet reports, or than Tortie would write.
    NodeAddressDiffers,
    /// An object of the datastore cannot be read completely; its effect is narrower.
    NotUnderstood,
    /// Packets of a pod leave a Windows node with another address than its pool demands.
    OutboundNatDiffers,
    /// The overlay's MAC address has changed, and other nodes send to the former one until this node announces it.
    OverlayRemade,
    /// Two IPPools have the same addresses, or one has those of nodes.
    PoolConflict,
    /// The IPPool of addresses in use has been changed or deleted.
    PoolMissing,
    /// The IPPool of addresses in use was deleted, and stays until they are released.
    PoolTerminating,
    /// Packets with the address of a pod of the node came from elsewhere and were dropped.
    PodAddressFromOutside,
    /// Something else leads packets to pods past their policy.
    PolicyBypassed,
    /// Policy, or its last change, is not in force.
    PolicyNotInForce,
    /// A set keeps its members, so ACLs name its addresses instead.
    PolicySetHeld,
    /// HNS refused a set, so ACLs name its addresses instead.
    PolicySetRefused,
    /// ACLs list addresses, because the report of the selftest does not prove that sets work; or they name sets against the report.
    PolicySetsNotProven,
    /// The overlay is bound to another address than the node's, to which other nodes send their packets.
    ProviderAddressDiffers,
    /// A route to other nodes' pods was refused, or is not possible on this node.
    RouteRefused,
    /// A foreign route is in the place of Tortie's.
    RouteTaken,
    /// The operating system cannot express a policy, which then denies everything.
    RuleNotExpressible,
    /// A rule matches ports of SCTP, which the operating system cannot match. The rule is narrowed if it allows, and
    /// widened if it denies.
    SctpPortNotExpressible,
    /// Two Services have the same address and port.
    ServiceAddressTaken,
    /// Policy allows only some backends of a Service.
    ServicePartlyAllowed,
    /// The agent is to serve Services, and does not, or not as they are now.
    ServicesNotServed,
    /// The state of the node for the next start of its agent is not saved.
    StateNotSaved,
    /// The node no longer has its subnet of flannel, so it gives pods no addresses, and packets to its pods go to the node that has it.
    SubnetLost,
    /// A policy, or the policies of a pod, have more rules than the operating system takes; the rest is closed.
    TooManyRules,
    /// The operating system has one port for VXLAN, and another one is configured.
    VxlanPortNotSupported,
}

impl Reason {
    /// The severity. There is no default, so that a new reason needs a decision.
    #[must_use]
    pub fn severity(self) -> Severity {
        use Reason::*;
        match self {
            AddressNotServed
            | AddressTaken
            | BgpRouteNotInForce
            | BgpSessionDown
            | BlocksTooSmall
            | CalicoLeftover
            | CalicoVersionUnknown
            | ClientAddressHidden
            | CniConfigNotWritten
            | ConnectionsNearLimit
            | ForeignAcl
            | ForeignChainMayDrop
            | ForeignChainsUnknown
            | HostEndpointNotEnforced
            | HostEndpointWithoutInterface
            | HostPortNotServed
            | HostPortTaken
            | IcmpTypeNotExpressible
            | InterfaceClosed
            | KernelModuleMissing
            | KindAbsent
            | NetworkPartNotInForce
            | NetworkWithoutIpv6
            | NodeAddressChanged
            | NodeAddressDiffers
            | NotUnderstood
            | OutboundNatDiffers
            | PodAddressFromOutside
            | PoolTerminating
            | PolicyBypassed
            | PolicySetHeld
            | PolicySetRefused
            | PolicySetsNotProven
            | RuleNotExpressible
            | SctpPortNotExpressible
            | ServiceAddressTaken
            | ServicePartlyAllowed
            | StateNotSaved
            | TooManyRules => Severity::Information,
            BgpSettingNotInForce | FieldNotSupported | KindForbidden | PoolConflict | PoolMissing => {
                Severity::WithoutEffect
            }
            BlockUnreachable
            | FirewallNotOpen
            | ForeignVxlanLink
            | HostRouteMissing
            | MoreThanOneBlock
            | OverlayRemade
            | ProviderAddressDiffers
            | RouteRefused
            | RouteTaken
            | ServicesNotServed
            | SubnetLost
            | VxlanPortNotSupported => Severity::Unreachable,
            AdapterDiffers | AdapterNotUsable | DatastoreLocked | Differs | EndpointMissing
            | HnsDidNotTake | HnsRefused | HnsUnavailable | InterfaceContested | InterfaceMissing
            | InterfaceUnproven | NetworkDiffers | NetworkMissing | NetworkNotInForce | NetworkNotReady
            | PolicyNotInForce => Severity::Failure,
        }
    }

    /// Returns whether pods of the node and those of others may not reach each other: they are out of reach, or the node has no network.
    #[must_use]
    pub fn disconnects(self) -> bool {
        use Reason::*;
        let is_without_network =
            matches!(self, HnsUnavailable | NetworkMissing | NetworkNotInForce | NetworkNotReady);
        is_without_network || self.severity() == Severity::Unreachable
    }

    /// Returns whether the reason of this name, which a report or a metric has, [disconnects](Self::disconnects).
    #[must_use]
    pub fn named_disconnects(name: &str) -> bool {
        let known: Result<Self, Error> = Self::deserialize(name.into_deserializer());
        known.is_ok_and(Self::disconnects)
    }

    /// Whether the object is not in force.
    #[must_use]
    pub fn is_failure(self) -> bool {
        self.severity() == Severity::Failure
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_the_severity_of_its_reason() {
        for (name, severity) in [
            ("PolicySetRefused", Severity::Information),
            ("FieldNotSupported", Severity::WithoutEffect),
            ("NetworkPartNotInForce", Severity::Information),
            ("ForeignVxlanLink", Severity::Unreachable),
            ("RouteRefused", Severity::Unreachable),
            ("RouteTaken", Severity::Unreachable),
            ("SubnetLost", Severity::Unreachable),
            ("BgpSessionDown", Severity::Information),
            ("BgpRouteNotInForce", Severity::Information),
            ("VxlanPortNotSupported", Severity::Unreachable),
            ("BlockUnreachable", Severity::Unreachable),
            ("NetworkNotInForce", Severity::Failure),
            ("PolicyNotInForce", Severity::Failure),
            ("SomethingNew", Severity::Failure),
            ("", Severity::Failure),
        ] {
            assert_eq!(Severity::of(name), severity, "{name}");
        }
        assert_eq!(Severity::of(&Reason::RouteTaken.to_string()), Severity::Unreachable);
        for (name, disconnects) in [
            ("RouteTaken", true),
            ("NetworkMissing", true),
            ("NetworkNotInForce", true),
            ("HnsUnavailable", true),
            ("PolicyNotInForce", false),
            ("BgpSessionDown", false),
            ("SomethingNew", false),
        ] {
            assert_eq!(Reason::named_disconnects(name), disconnects, "{name}");
        }
    }

    #[test]
    fn the_documentation_lists_each_reason_with_its_severity() {
        let text = include_str!("../../../docs/operate.md");
        let table = text.lines().skip_while(|line| !line.starts_with("| severity | meaning | reasons |"));
        let rows: Vec<&str> = table.skip(2).take_while(|line| line.starts_with('|')).collect();
        assert_eq!(rows.len(), 4, "{rows:?}");
        let mut listed = 0;
        for row in rows {
            let severity = row.trim_matches(['|', ' ']).split(" | ").next().unwrap().replace(' ', "_");
            for name in row.split('`').skip(1).step_by(2) {
                assert_eq!(Severity::of(name).label(), severity, "{name}");
                let known: Result<Reason, Error> = Reason::deserialize(name.into_deserializer());
                assert!(known.is_ok(), "{name} is no reason");
                listed += 1;
            }
        }
        let variants = include_str!("reason.rs").lines().skip_while(|line| !line.contains("pub enum Reason"));
        let variants = variants.take_while(|line| *line != "}");
        let count = variants.filter(|line| line.ends_with(',') && !line.contains("///")).count();
        assert_eq!(listed, count, "docs/operate.md lists every reason once");
    }

    /// Packets between nodes close no pod and delay no policy.
    #[test]
    fn what_is_out_of_reach_is_no_failure() {
        for reason in [Reason::BlockUnreachable, Reason::ForeignVxlanLink, Reason::SubnetLost] {
            assert!(!reason.is_failure(), "{reason}");
        }
    }
}
