//! What a build of HNS does where its documentation is silent or sources conflict: a report, made in a network of its own.
//!
//! [`run`] asks by documents and, where [`Traffic`] can send, by packets. Whatever cannot be asked has no answer. An emulated HNS
//! can be started as the report says, so that tests run against a copy of a real build. [`HnsReport::proves_sets`] says whether the
//! agent may use sets in ACLs.

mod documents;
mod limits;
mod packets;
mod proof;
mod sets;

pub use proof::{NotProven, ReportError};

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};

use crate::schema::{
    Acl, AclAction, AclDirection, AclRuleType, Endpoint, HostRoute, IpConfig, Ipam, NetAdapterName, Network,
    NetworkFlags, NetworkMode, Policy, Route, SchemaVersion, Subnet, Vsid,
};
use crate::{Error, Guid, Hcn, HcnExt, Version};

/// The name of the network.
pub const CANARY: &str = "tortie-selftest";
/// Its subnet, from the range for measurements of networks (RFC 2544).
const SUBNET: &str = "198.18.0.0/24";
const GATEWAY: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
/// The address of the endpoint that the questions use.
const LOCAL: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 9);
/// The only member of a set that would be empty otherwise. No packet has this address, which is reserved (RFC 1112).
pub const NOBODY: &str = "240.0.0.0";
/// Its VNI; no cluster should have it.
const VNI: u32 = 15_999_999;

/// What happens to a packet that no ACL matches, if there is any ACL. Microsoft says "denied", but builds differ
/// (docs/hns.md, ACLs).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DefaultAction {
    /// An ACL of either direction closes both directions.
    DenyBoth,
    /// An ACL closes its own direction.
    DenySameDirection,
    /// Nothing closes.
    Allow,
}

/// What a set identifier in LocalAddresses and RemoteAddresses means. Addresses there always have the same meaning:
/// local is the endpoint, remote its peer. So do ports, in both interpretations (the sources conflict on sets:
/// docs/hns.md, ACLs).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SetReading {
    /// The same as for an address: local is the endpoint and remote its peer, in both directions.
    Endpoint,
    /// Local is the source of the packet and remote its destination, in both directions, as azure-npm writes them.
    Flow,
}

/// How several sets in one field combine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SeveralSets {
    /// Members of any of them match.
    Union,
    /// Members of all of them match, as azure-npm writes them.
    Intersection,
}

/// Which of two matching ACLs with equal priority and different actions wins. No source says (docs/hns.md, ACLs).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum EqualPriority {
    /// Block.
    BlockWins,
    /// Allow.
    AllowWins,
}

/// Which destination of a packet to a Service the sender's ACLs see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum EgressSees {
    /// The Service's address and port.
    Vip,
    /// The backend's address and port.
    Backend,
}

/// What writing an endpoint's ACLs does to its established flows. A reset flow ends: for TCP, both ends get a RST;
/// flows of other protocols are forgotten, and their next packet is evaluated again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum OnRewrite {
    /// They continue.
    Keep,
    /// Every request that writes ACLs resets them, even if it changes nothing. Users report this.
    ResetOnAnyChange,
    /// A request that removes or replaces ACLs resets them; a request that only adds ACLs does not.
    ResetOnRemoveOrUpdate,
}

/// What a request to remove ACLs from an endpoint does. azure-npm considers Remove faulty (docs/hns.md, Changes).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum AclRemoval {
    /// It removes them.
    Works,
    /// It is rejected with HCN_E_REQUEST_UNSUPPORTED (docs/hns.md, Calls).
    RefusedAlways,
    /// It returns success, and they stay.
    IgnoredSilently,
}

/// Which policies of an endpoint an Update replaces (docs/hns.md, Changes).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum UpdateReplaces {
    /// All of them.
    All,
    /// Those with a type in the request.
    SameType,
    /// Those, and ACLs in any case: azure-npm removes the last ACLs by a request without any, and Calico's plugin adds ACLs by a request
    /// without the other policies.
    AclsAndSameType,
}

/// What was found. An answer that is absent could not be had. The JSON form names each answer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct HnsReport {
    /// The format of the report: [`HnsReport::FORMAT`].
    pub format: Option<u32>,
    /// The version that HNS tells.
    pub version: Option<Version>,
    /// The build of Windows, as in `20348.2762`, of which HNS is a part: updates change HNS without another version.
    pub build: Option<String>,
    /// Who sent the packets of the answers that need some.
    pub packets_by: Option<String>,
    /// Whether a document with an unknown member is rejected.
    pub strict: Option<bool>,
    /// Whether an endpoint has the identifier that the client chose.
    pub keeps_ids: Option<bool>,
    /// Whether an ACL is returned with its `Id`.
    pub keeps_acl_ids: Option<bool>,
    /// Whether an endpoint of the node may have the address of a remote endpoint.
    pub accepts_taken_addresses: Option<bool>,
    /// The members with a zero value that HNS returns, such as `Action` of an ACL that allows.
    pub returned_zeroes: Option<Vec<String>>,
    /// Unusual ACLs by what is unusual, and whether HNS accepts them.
    pub accepts: BTreeMap<String, bool>,
    /// What a request to remove ACLs does.
    pub acl_removal: Option<AclRemoval>,
    /// Which policies an Update replaces.
    pub update_replaces: Option<UpdateReplaces>,
    /// Whether HNS accepts sets of sets: azure-npm sends them to versions that should not have them.
    pub accepts_nested_sets: Option<bool>,
    /// Whether a network with endpoints can be deleted.
    pub deletes_used_networks: Option<bool>,
    /// The limits that were found.
    pub limits: FoundLimits,
    /// What happens at the switch to a packet that no ACL matches.
    pub switch_default: Option<DefaultAction>,
    /// The same in the node's firewall; `Some(None)` (JSON: `"none"`) if its ACLs have no effect.
    pub host_default: Option<HostDefault>,
    /// Which action wins at equal priority.
    pub equal_priority: Option<EqualPriority>,
    /// What a set in an ACL means.
    pub set_reading: Option<SetReading>,
    /// How several sets in one field combine.
    pub several_sets: Option<SeveralSets>,
    /// Whether ACLs with sets do what the agent needs.
    pub sets: SetAnswers,
    /// Which destination of a packet to a Service the ACLs see.
    pub egress_sees: Option<EgressSees>,
    /// What writing ACLs does to established flows.
    pub on_rewrite: Option<OnRewrite>,
}

/// Whether ACLs with sets match those packets that they should: each is true if all packets of the question passed or were
/// dropped as they should be. The ACLs are those that the agent writes: right in each [`SetReading`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct SetAnswers {
    /// An ACL that allows packets from the members of a set allows these, and no others.
    pub allows_inbound: Option<bool>,
    /// The same of packets to the members.
    pub allows_outbound: Option<bool>,
    /// An ACL that blocks packets from the members blocks these, and no others.
    pub blocks_inbound: Option<bool>,
    /// The same of packets to the members.
    pub blocks_outbound: Option<bool>,
    /// A member may be a network.
    pub has_networks: Option<bool>,
    /// An ACL matches if both ends are members of the set that it names on both sides, and otherwise not.
    pub matches_both_sides: Option<bool>,
    /// An ACL with a set and ports matches packets of members to these ports only.
    pub has_ports: Option<bool>,
    /// A set that has [`NOBODY`] only matches nothing.
    pub nobody_matches_nothing: Option<bool>,
    /// A member that a set gets counts for new flows, although no ACL is written.
    pub gets_members: Option<bool>,
    /// A member that a set loses does not count any more.
    pub loses_members: Option<bool>,
}

/// What the node's firewall does to a packet that none of its ACLs match.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum HostDefault {
    /// Its ACLs have no effect.
    NotInvolved,
    /// Its ACLs have an effect.
    Involved(DefaultAction),
}

/// The largest numbers that HNS accepts. `Some(None)` would say that there is no limit below the largest number that was tried.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct FoundLimits {
    /// Entries in one field of an ACL.
    pub field_entries: Option<Limit>,
    /// Members of one set.
    pub set_members: Option<Limit>,
    /// ACLs of one endpoint.
    pub endpoint_acls: Option<Limit>,
    /// Policies in one request that modifies an endpoint.
    pub modify_policies: Option<Limit>,
    /// The lowest and the highest priority of ACLs of RuleType Switch.
    pub priorities: Option<(u16, u16)>,
}

/// A limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Limit {
    /// At most so many.
    AtMost(usize),
    /// As many as were tried.
    NoneBelow(usize),
}

/// A packet to ask about, seen from the endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProbePacket {
    /// Whether it goes to the endpoint.
    pub inbound: bool,
    /// Its peer and the peer's port.
    pub peer: (Ipv4Addr, u16),
    /// The endpoint's port.
    pub port: u16,
    /// The Service by which it is sent.
    pub service: Option<(Ipv4Addr, u16)>,
}

/// Sends TCP packets of endpoints of the network, and tells what happens to them. `None`: it cannot.
pub trait Traffic {
    /// Whether the first packet of a flow passes; then the flow is established.
    fn open(&self, endpoint: Guid, local: Ipv4Addr, packet: &ProbePacket) -> Option<bool>;

    /// Whether an established flow continues.
    fn is_open(&self, endpoint: Guid, local: Ipv4Addr, packet: &ProbePacket) -> Option<bool>;

    /// Who sends the packets, for the report; `None` if nobody does.
    fn sender(&self) -> Option<String>;
}

/// Sends nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoTraffic;

impl Traffic for NoTraffic {
    fn open(&self, _: Guid, _: Ipv4Addr, _: &ProbePacket) -> Option<bool> {
        None
    }

    fn is_open(&self, _: Guid, _: Ipv4Addr, _: &ProbePacket) -> Option<bool> {
        None
    }

    fn sender(&self) -> Option<String> {
        None
    }
}

/// The network for the questions, which goes with this value.
struct Canary<'a> {
    hcn: &'a dyn Hcn,
    traffic: &'a dyn Traffic,
    version: Version,
    network: Guid,
    /// The lowest priority that HNS takes at the switch.
    base: u16,
}

/// Asks HNS. `adapter` names the adapter of the network, if HNS should not choose. The caller knows the build of Windows.
///
/// # Errors
/// The network cannot be made, or a call fails that cannot fail. The network is removed in any case.
pub fn run(hcn: &dyn Hcn, traffic: &dyn Traffic, adapter: Option<&str>) -> Result<HnsReport, Error> {
    if let Some(rest) = hcn.network_by_name(CANARY)? {
        remove(hcn, rest.id)?;
    }
    let version = hcn.version()?;
    let network = hcn.create_network(&network(adapter))?;
    let mut canary = Canary { hcn, traffic, version, network, base: 1 };
    let asked = canary.ask();
    match asked {
        Ok(mut report) => {
            report.deletes_used_networks = Some(canary.deletes_with_endpoint()?);
            remove(hcn, network)?;
            Ok(report)
        }
        Err(error) => {
            remove(hcn, network)?;
            Err(error)
        }
    }
}

impl Canary<'_> {
    fn ask(&mut self) -> Result<HnsReport, Error> {
        let mut report = HnsReport {
            format: Some(HnsReport::FORMAT),
            version: Some(self.version),
            packets_by: self.traffic.sender(),
            ..HnsReport::default()
        };
        let priorities = self.priorities()?;
        self.base = priorities.map_or(self.base, |(lowest, _)| lowest);
        self.ask_about_limits(&mut report)?;
        report.limits.priorities = priorities;
        self.ask_by_documents(&mut report)?;
        self.ask_by_packets(&mut report)?;
        Ok(report)
    }

    /// An ACL of the switch; a larger number comes later.
    fn acl(&self, direction: AclDirection, action: AclAction, number: u16) -> Acl {
        let priority = self.base.saturating_add(number);
        Acl {
            id: format!("selftest-{number}"),
            protocols: String::new(),
            action,
            direction,
            local_addresses: String::new(),
            remote_addresses: String::new(),
            local_ports: String::new(),
            remote_ports: String::new(),
            rule_type: AclRuleType::Switch,
            priority,
            extra: Default::default(),
        }
    }

    /// The same in the node's firewall.
    fn host_acl(&self, direction: AclDirection, action: AclAction) -> Acl {
        Acl { rule_type: AclRuleType::Host, priority: 0, ..self.acl(direction, action, 0) }
    }

    /// Asks a question with an endpoint of its own, which has these policies.
    fn with_endpoint<T>(
        &self,
        policies: Vec<Policy>,
        ask: impl FnOnce(Guid) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let id = self.hcn.create_endpoint(&self.endpoint(policies))?;
        let answer = ask(id);
        self.hcn.delete_endpoint(id)?;
        answer
    }

    /// Whether HNS accepts an endpoint with these policies. Only an unavailable HNS is an error.
    fn takes(&self, policies: Vec<Policy>) -> Result<bool, Error> {
        match self.hcn.create_endpoint(&self.endpoint(policies)) {
            Ok(id) => self.hcn.delete_endpoint(id).map(|()| true),
            Err(error) if error.class() == crate::Class::Unavailable => Err(error),
            Err(_) => Ok(false),
        }
    }

    fn endpoint(&self, policies: Vec<Policy>) -> Endpoint {
        let mut endpoint = Endpoint {
            id: Guid::random(),
            name: CANARY.to_owned(),
            host_compute_network: self.network,
            policies,
            ip_configurations: vec![IpConfig { ip_address: LOCAL.to_string(), ..Default::default() }],
            routes: vec![default_route()],
            mac_address: "0E-2A-C6-12-00-09".to_owned(),
            ..Default::default()
        };
        endpoint.base.schema_version = Some(SchemaVersion::V2);
        endpoint
    }

    fn deletes_with_endpoint(&self) -> Result<bool, Error> {
        self.hcn.create_endpoint(&self.endpoint(Vec::new()))?;
        // What it says is not believed.
        let _ = self.hcn.delete_network(self.network);
        Ok(self.hcn.network_by_name(CANARY)?.is_none())
    }
}

fn default_route() -> Route {
    Route { next_hop: GATEWAY.to_string(), destination_prefix: "0.0.0.0/0".to_owned(), ..Default::default() }
}

fn network(adapter: Option<&str>) -> Network {
    let mut policies = vec![Policy::of(&HostRoute::default())];
    policies.extend(adapter.map(|name| {
        Policy::of(&NetAdapterName { network_adapter_name: name.to_owned(), ..Default::default() })
    }));
    let subnet = Subnet {
        ip_address_prefix: SUBNET.to_owned(),
        policies: vec![Policy::of(&Vsid { isolation_id: VNI, ..Default::default() })],
        routes: vec![default_route()],
        ..Default::default()
    };
    let mut network = Network {
        name: CANARY.to_owned(),
        r#type: NetworkMode::Overlay,
        policies,
        ipams: vec![Ipam { r#type: "Static".to_owned(), subnets: vec![subnet], ..Default::default() }],
        flags: NetworkFlags::ENABLE_NON_PERSISTENT,
        ..Default::default()
    };
    network.base.schema_version = Some(SchemaVersion::V2);
    network
}

/// Removes the network and its endpoints, if it is still there.
fn remove(hcn: &dyn Hcn, network: Guid) -> Result<(), Error> {
    match hcn.endpoints_of_network(network) {
        Ok(endpoints) => endpoints.iter().try_for_each(|endpoint| hcn.delete_endpoint(endpoint.id))?,
        Err(error) if error.is_not_found() => {}
        Err(error) => return Err(error),
    }
    match hcn.delete_network(network) {
        Err(error) if error.is_not_found() => Ok(()),
        result => result,
    }
}
