//! Questions that only packets answer.

use std::net::Ipv4Addr;

use super::{
    Canary, DefaultAction, EgressSees, EqualPriority, HnsReport, HostDefault, LOCAL, OnRewrite, ProbePacket,
};
use crate::schema::{Acl, AclAction, AclDirection, Modify, Policy, RequestType};
use crate::{Error, Feature, HcnExt};

pub(super) const PEER: Ipv4Addr = Ipv4Addr::new(198, 19, 0, 1);
pub(super) const OTHER: Ipv4Addr = Ipv4Addr::new(198, 19, 0, 2);
const SERVICE: Ipv4Addr = Ipv4Addr::new(198, 19, 255, 1);

pub(super) const BOTH: [AclDirection; 2] = [AclDirection::In, AclDirection::Out];

pub(super) fn inbound() -> ProbePacket {
    ProbePacket { inbound: true, peer: (PEER, 40_000), port: 80, service: None }
}

pub(super) fn outbound() -> ProbePacket {
    ProbePacket { inbound: false, peer: (PEER, 80), port: 40_000, service: None }
}

impl Canary<'_> {
    /// What lets everything pass the firewall.
    pub(super) fn open_host(&self) -> Vec<Acl> {
        BOTH.map(|direction| self.host_acl(direction, AclAction::Allow)).into()
    }

    /// What lets everything pass the switch.
    pub(super) fn open_switch(&self) -> Vec<Acl> {
        BOTH.map(|direction| self.acl(direction, AclAction::Allow, 10)).into()
    }

    pub(super) fn ask_by_packets(&self, report: &mut HnsReport) -> Result<(), Error> {
        report.switch_default = self.switch_default()?;
        report.host_default = self.host_default()?;
        report.equal_priority = self.equal_priority()?;
        report.egress_sees = self.egress_sees()?;
        report.on_rewrite = self.on_rewrite()?;
        if self.version.supports(Feature::SetPolicy) {
            self.ask_about_sets(report)?;
        }
        Ok(())
    }

    /// Whether these packets pass an endpoint with these ACLs.
    pub(super) fn pass<const N: usize>(
        &self,
        acls: Vec<Acl>,
        packets: [ProbePacket; N],
    ) -> Result<[Option<bool>; N], Error> {
        let policies = acls.iter().map(Policy::of).collect();
        self.with_endpoint(policies, |id| Ok(packets.map(|packet| self.traffic.open(id, LOCAL, &packet))))
    }

    fn switch_default(&self) -> Result<Option<DefaultAction>, Error> {
        let unrelated =
            Acl { remote_addresses: OTHER.to_string(), ..self.acl(AclDirection::In, AclAction::Allow, 0) };
        let acls = [self.open_host(), vec![unrelated]].concat();
        Ok(default_action(self.pass(acls, [inbound(), outbound()])?))
    }

    fn host_default(&self) -> Result<Option<HostDefault>, Error> {
        let block = self.host_acl(AclDirection::In, AclAction::Block);
        let [blocked] = self.pass([self.open_switch(), vec![block]].concat(), [inbound()])?;
        match blocked {
            None => return Ok(None),
            Some(true) => return Ok(Some(HostDefault::NotInvolved)),
            Some(false) => {}
        }
        let unrelated =
            Acl { remote_addresses: OTHER.to_string(), ..self.host_acl(AclDirection::In, AclAction::Allow) };
        let passed = self.pass([self.open_switch(), vec![unrelated]].concat(), [inbound(), outbound()])?;
        Ok(default_action(passed).map(HostDefault::Involved))
    }

    fn equal_priority(&self) -> Result<Option<EqualPriority>, Error> {
        let two = [AclAction::Block, AclAction::Allow].map(|action| self.acl(AclDirection::In, action, 0));
        let [passed] = self.pass([self.open_host(), two.into()].concat(), [inbound()])?;
        Ok(passed.map(|passed| if passed { EqualPriority::AllowWins } else { EqualPriority::BlockWins }))
    }

    fn egress_sees(&self) -> Result<Option<EgressSees>, Error> {
        let to_service =
            Acl { remote_addresses: SERVICE.to_string(), ..self.acl(AclDirection::Out, AclAction::Allow, 0) };
        let rest = self.acl(AclDirection::Out, AclAction::Block, 1);
        let packet = ProbePacket { service: Some((SERVICE, 80)), ..outbound() };
        let [passed] = self.pass([self.open_host(), vec![to_service, rest]].concat(), [packet])?;
        Ok(passed.map(|passed| if passed { EgressSees::Vip } else { EgressSees::Backend }))
    }

    fn on_rewrite(&self) -> Result<Option<OnRewrite>, Error> {
        let acls = [self.open_host(), self.open_switch()].concat();
        let request = |kind, acls: &[Acl]| Modify::policies(kind, acls.iter().map(Policy::of).collect());
        let more =
            Acl { remote_addresses: OTHER.to_string(), ..self.acl(AclDirection::In, AclAction::Allow, 5) };
        self.with_endpoint(acls.iter().map(Policy::of).collect(), |id| {
            let flow = inbound();
            if self.traffic.open(id, LOCAL, &flow) != Some(true) {
                return Ok(None);
            }
            self.hcn.modify_endpoint(id, &request(RequestType::Add, &[more]))?;
            if self.traffic.is_open(id, LOCAL, &flow) == Some(false) {
                return Ok(Some(OnRewrite::ResetOnAnyChange));
            }
            self.hcn.modify_endpoint(id, &request(RequestType::Update, &acls))?;
            Ok(self.traffic.is_open(id, LOCAL, &flow).map(|continues| match continues {
                true => OnRewrite::Keep,
                false => OnRewrite::ResetOnRemoveOrUpdate,
            }))
        })
    }
}

/// What happens to packets in and out that no ACL matches, where one ACL is inbound.
fn default_action(passed: [Option<bool>; 2]) -> Option<DefaultAction> {
    match passed {
        [Some(false), Some(false)] => Some(DefaultAction::DenyBoth),
        [Some(false), Some(true)] => Some(DefaultAction::DenySameDirection),
        [Some(true), Some(true)] => Some(DefaultAction::Allow),
        _ => None,
    }
}
