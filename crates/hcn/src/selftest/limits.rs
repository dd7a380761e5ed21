//! Questions about numbers: how many of something HNS accepts.

use std::net::Ipv4Addr;

use super::{Canary, FoundLimits, HnsReport, Limit};
use crate::schema::{
    Acl, AclAction, AclDirection, Modify, Policy, RequestType, SdnRoute, SetPolicy, SetPolicyType,
};
use crate::{Error, Feature, HcnExt};

/// The largest numbers that are tried. Larger ones take HNS long.
const ENTRIES: usize = 8_192;
const ACLS: usize = 1_024;
const POLICIES: usize = 256;
const MEMBERS: usize = 8_192;
/// Priorities, one of which HNS should accept.
const PRIORITIES: [u16; 7] = [1_000, 100, 10, 1, 10_000, 60_000, 65_500];

impl Canary<'_> {
    pub(super) fn ask_about_limits(&self, report: &mut HnsReport) -> Result<(), Error> {
        report.limits = FoundLimits {
            field_entries: limit(ENTRIES, |count| {
                let acl = Acl { remote_addresses: addresses(count), ..self.usual() };
                self.takes(vec![Policy::of(&acl)])
            })?,
            set_members: match self.version.supports(Feature::SetPolicy) {
                true => limit(MEMBERS, |count| self.takes_set(count))?,
                false => None,
            },
            endpoint_acls: limit(ACLS, |count| {
                let acls = (0..count).map(|number| Acl { remote_addresses: address(number), ..self.usual() });
                self.takes(acls.map(|acl| Policy::of(&acl)).collect())
            })?,
            modify_policies: limit(POLICIES, |count| self.takes_request(count))?,
            priorities: None,
        };
        Ok(())
    }

    fn takes_set(&self, count: usize) -> Result<bool, Error> {
        let set = SetPolicy {
            id: "tortie-selftest".to_owned(),
            name: String::new(),
            policy_type: SetPolicyType::IpSet,
            values: addresses(count),
            extra: Default::default(),
        };
        let request = |kind| Modify::policies(kind, vec![Policy::of(&set)]);
        match self.hcn.modify_network(self.network, &request(RequestType::Add)) {
            Ok(()) => self.hcn.modify_network(self.network, &request(RequestType::Remove)).map(|()| true),
            Err(error) if error.class() == crate::Class::Unavailable => Err(error),
            Err(_) => Ok(false),
        }
    }

    /// Routes instead of ACLs, because these may have a limit of their own.
    fn takes_request(&self, count: usize) -> Result<bool, Error> {
        let route = |number| {
            let destination_prefix = format!("{}/32", address(number));
            Policy::of(&SdnRoute { destination_prefix, need_encap: true, ..Default::default() })
        };
        let request = Modify::policies(RequestType::Add, (0..count).map(route).collect());
        self.with_endpoint(Vec::new(), |id| match self.hcn.modify_endpoint(id, &request) {
            Ok(()) => Ok(true),
            Err(error) if error.class() == crate::Class::Unavailable => Err(error),
            Err(_) => Ok(false),
        })
    }

    fn usual(&self) -> Acl {
        self.acl(AclDirection::In, AclAction::Allow, 0)
    }

    /// The lowest and the highest priority at the switch.
    pub(super) fn priorities(&self) -> Result<Option<(u16, u16)>, Error> {
        let takes = |priority| self.takes(vec![Policy::of(&Acl { priority, ..self.usual() })]);
        for known in PRIORITIES {
            if takes(known)? {
                let lowest = first(1, known, takes)?;
                let highest = first(0, u16::MAX - known, |below| takes(u16::MAX - below))?;
                return Ok(Some((lowest, u16::MAX - highest)));
            }
        }
        Ok(None)
    }
}

fn address(number: usize) -> String {
    let number = u32::try_from(number).unwrap_or(u32::MAX);
    // Not adjacent, so that nobody merges them.
    Ipv4Addr::from(0x0b00_0000_u32.wrapping_add(number.wrapping_mul(2))).to_string()
}

fn addresses(count: usize) -> String {
    (0..count).map(address).collect::<Vec<_>>().join(",")
}

/// The largest accepted number up to this one; `None` if not even one is accepted.
fn limit(most: usize, mut takes: impl FnMut(usize) -> Result<bool, Error>) -> Result<Option<Limit>, Error> {
    let mut accepted = 0;
    let mut next = 1;
    while next <= most && takes(next)? {
        (accepted, next) = (next, next * 2);
    }
    if next > most {
        return Ok(Some(Limit::NoneBelow(accepted)));
    }
    let mut refused = next;
    while accepted + 1 < refused {
        let middle = accepted.midpoint(refused);
        if takes(middle)? { accepted = middle } else { refused = middle }
    }
    Ok((accepted > 0).then_some(Limit::AtMost(accepted)))
}

/// The lowest accepted number, if all from there to `accepted` are.
fn first(
    mut lowest: u16,
    mut accepted: u16,
    mut takes: impl FnMut(u16) -> Result<bool, Error>,
) -> Result<u16, Error> {
    while lowest < accepted {
        let middle = lowest.midpoint(accepted);
        if takes(middle)? { accepted = middle } else { lowest = middle + 1 }
    }
    Ok(accepted)
}
