//! Questions about sets in ACLs, which only packets answer. The agent relies on all of them before it uses sets.

use super::documents::{self, own};
use super::packets::{OTHER, PEER, inbound, outbound};
use super::{Canary, HnsReport, LOCAL, NOBODY, ProbePacket, SetAnswers, SetReading, SeveralSets};
use crate::schema::{Acl, AclAction, AclDirection, Modify, Policy, RequestType, SetPolicyType};
use crate::{Class, Error, HcnExt};

/// The sets of the questions: identifier and members. The network holds [`PEER`], and not [`OTHER`].
const OF_PEER: &str = "tortie-peer";
const OF_OTHER: &str = "tortie-other";
const OF_OWN: &str = "tortie-own";
const OF_BOTH: &str = "tortie-both";
const OF_NETWORK: &str = "tortie-network";
const CHANGING: &str = "tortie-changing";
const OF_NOBODY: &str = "tortie-nobody";

/// Whether a packet should pass.
type Expected = (ProbePacket, bool);

fn set(id: &str, values: String) -> Policy {
    documents::set(id, SetPolicyType::IpSet, values)
}

fn from(peer: std::net::Ipv4Addr, port: u16) -> ProbePacket {
    ProbePacket { peer: (peer, port), ..inbound() }
}

fn to(peer: std::net::Ipv4Addr) -> ProbePacket {
    ProbePacket { peer: (peer, 80), ..outbound() }
}

impl Canary<'_> {
    pub(super) fn ask_about_sets(&self, report: &mut HnsReport) -> Result<(), Error> {
        let sets = [
            set(OF_PEER, PEER.to_string()),
            set(OF_OTHER, OTHER.to_string()),
            set(OF_OWN, own()),
            set(OF_BOTH, format!("{},{PEER}", own())),
            set(OF_NETWORK, "198.19.0.0/31".to_owned()),
            set(CHANGING, OTHER.to_string()),
            set(OF_NOBODY, NOBODY.to_owned()),
        ];
        let request = |kind, sets: &[Policy]| Modify::policies(kind, sets.to_vec());
        self.hcn.modify_network(self.network, &request(RequestType::Add, &sets))?;
        let asked = self.ask_with_sets(report);
        self.hcn.modify_network(self.network, &request(RequestType::Remove, &sets))?;
        asked
    }

    fn ask_with_sets(&self, report: &mut HnsReport) -> Result<(), Error> {
        self.ask_what_sets_mean(report)?;
        let allow = |id| self.named(AclAction::Allow, id);
        let block = |id| self.named(AclAction::Block, id);
        let members_in = [(from(PEER, 40_000), true), (from(OTHER, 40_000), false)];
        let members_out = [(to(PEER), true), (to(OTHER), false)];
        let (others_in, others_out) = (members_in.map(inverted), members_out.map(inverted));
        let both = vec![Acl {
            local_addresses: OF_BOTH.to_owned(),
            remote_addresses: OF_BOTH.to_owned(),
            ..self.acl(AclDirection::In, AclAction::Allow, 0)
        }];
        let of_port = |acl| Acl { protocols: "6".to_owned(), local_ports: "80".to_owned(), ..acl };
        let with_port = allow(OF_PEER).into_iter().map(of_port).collect();
        let ports = [members_in[0], members_in[1], (ProbePacket { port: 81, ..from(PEER, 40_001) }, false)];
        let nothing = [(from(PEER, 40_000), false), (to(PEER), false)];
        let (gets_members, loses_members) = self.ask_about_changes()?;
        report.sets = SetAnswers {
            allows_inbound: self.as_expected(allow(OF_PEER), false, members_in)?,
            allows_outbound: self.as_expected(allow(OF_PEER), false, members_out)?,
            blocks_inbound: self.as_expected(block(OF_PEER), true, others_in)?,
            blocks_outbound: self.as_expected(block(OF_PEER), true, others_out)?,
            has_networks: self.as_expected(allow(OF_NETWORK), false, members_in)?,
            matches_both_sides: self.as_expected(both, false, members_in)?,
            has_ports: self.as_expected(with_port, false, ports)?,
            nobody_matches_nothing: self.as_expected(allow(OF_NOBODY), false, nothing)?,
            gets_members,
            loses_members,
        };
        Ok(())
    }

    fn ask_what_sets_mean(&self, report: &mut HnsReport) -> Result<(), Error> {
        let from = |local: &str, remote: &str| {
            let allow = self.acl(AclDirection::In, AclAction::Allow, 0);
            let allow =
                Acl { local_addresses: local.to_owned(), remote_addresses: remote.to_owned(), ..allow };
            [self.open_host(), vec![allow, self.acl(AclDirection::In, AclAction::Block, 20)]].concat()
        };
        let [as_endpoint] = self.pass(from(OF_OWN, OF_PEER), [inbound()])?;
        let [as_flow] = self.pass(from(OF_PEER, OF_OWN), [inbound()])?;
        report.set_reading = match (as_endpoint, as_flow) {
            (Some(true), Some(false)) => Some(SetReading::Endpoint),
            (Some(false), Some(true)) => Some(SetReading::Flow),
            _ => None,
        };
        let several = format!("{OF_PEER},{OF_OTHER}");
        let both = match report.set_reading {
            Some(SetReading::Endpoint) => from("", &several),
            Some(SetReading::Flow) => from(&several, ""),
            None => return Ok(()),
        };
        let [passed] = self.pass(both, [inbound()])?;
        report.several_sets =
            passed.map(|passed| if passed { SeveralSets::Union } else { SeveralSets::Intersection });
        Ok(())
    }

    /// ACLs about packets from and to the members of a set, without the endpoint: for packets to the endpoint one ACL for each
    /// [`SetReading`].
    fn named(&self, action: AclAction, id: &str) -> Vec<Acl> {
        let acl = |direction| self.acl(direction, action.clone(), 0);
        let (inward, outward) = (acl(AclDirection::In), acl(AclDirection::Out));
        vec![
            Acl { remote_addresses: id.to_owned(), ..inward.clone() },
            Acl { local_addresses: id.to_owned(), priority: inward.priority.saturating_add(1), ..inward },
            Acl { remote_addresses: id.to_owned(), ..outward },
        ]
    }

    /// The ACLs, and what happens to packets that none of them matches.
    fn with_rest(&self, acls: Vec<Acl>, rest_passes: bool) -> Vec<Acl> {
        let rest = if rest_passes { AclAction::Allow } else { AclAction::Block };
        let rest = super::packets::BOTH.map(|direction| self.acl(direction, rest.clone(), 20));
        [self.open_host(), acls, rest.into()].concat()
    }

    /// Whether all packets pass an endpoint with these ACLs, or are dropped, as expected. `None` if HNS refuses the ACLs, or a packet
    /// cannot be sent.
    fn as_expected<const N: usize>(
        &self,
        acls: Vec<Acl>,
        rest_passes: bool,
        packets: [Expected; N],
    ) -> Result<Option<bool>, Error> {
        match self.pass(self.with_rest(acls, rest_passes), packets.map(|(packet, _)| packet)) {
            Ok(passed) => Ok(agrees(passed, packets.map(|(_, expected)| expected))),
            Err(error) if error.class() == Class::Unavailable => Err(error),
            Err(_) => Ok(None),
        }
    }

    /// Whether a set that changes under an ACL lets new flows of new members in, and those of former members no longer.
    fn ask_about_changes(&self) -> Result<(Option<bool>, Option<bool>), Error> {
        let acls = self.with_rest(self.named(AclAction::Allow, CHANGING), false);
        self.with_endpoint(acls.iter().map(Policy::of).collect(), |id| {
            let passes = |peer, port| self.traffic.open(id, LOCAL, &from(peer, port));
            let holds = |peers: String| {
                self.accepts(&Modify::policies(RequestType::Update, vec![set(CHANGING, peers)]))
            };
            let before = [passes(PEER, 40_000), passes(OTHER, 40_000)];
            let mut are_done = holds(format!("{OTHER},{PEER}"))?;
            let with_both = [passes(PEER, 40_001), passes(OTHER, 40_001)];
            are_done &= holds(PEER.to_string())?;
            let after = [passes(PEER, 40_002), passes(OTHER, 40_002)];
            are_done &= holds(NOBODY.to_owned())?;
            let with_none = [passes(PEER, 40_003), passes(OTHER, 40_003)];
            // As it was created, so that it can be removed.
            are_done &= holds(OTHER.to_string())?;
            if !are_done {
                return Ok((None, None));
            }
            let gets = [agrees(before, [false, true]), agrees(with_both, [true, true])];
            let loses = [agrees(after, [true, false]), agrees(with_none, [false, false])];
            Ok((all(gets), all(loses)))
        })
    }
}

fn inverted((packet, expected): Expected) -> Expected {
    (packet, !expected)
}

/// Whether each packet did as expected. One that did not decides, even if others could not be sent.
fn agrees<const N: usize>(passed: [Option<bool>; N], expected: [bool; N]) -> Option<bool> {
    let each = std::array::from_fn::<_, N, _>(|at| passed[at].map(|passed| passed == expected[at]));
    all(each)
}

fn all<const N: usize>(answers: [Option<bool>; N]) -> Option<bool> {
    if answers.contains(&Some(false)) {
        return Some(false);
    }
    answers.iter().all(Option::is_some).then_some(true)
}
