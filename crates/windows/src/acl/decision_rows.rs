//! Decisions as rows, each about one protocol or all.

use std::sync::Arc;

use tortie_api::net::Protocol;
use tortie_hcn::schema::AclAction;

use super::flatten::{Decision, Verdict};
use super::ranges::Protocols;
use super::region::Side;

/// "Any protocol" in HNS.
pub(crate) const ANY_PROTOCOL: u16 = 256;

/// A decision about one protocol or all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Row {
    /// Allow or Block.
    pub action: AclAction,
    /// A number, or [`ANY_PROTOCOL`].
    pub protocol: u16,
    /// The endpoint's side.
    pub local: Side,
    /// The peer's side.
    pub remote: Side,
    /// The origin of the decision.
    pub origin: Arc<str>,
}

/// The list as rows, of which the first match counts. What no row matches is denied.
pub(super) fn rows(list: &[Decision]) -> Vec<Row> {
    // An ACL matches one protocol or all; it cannot exclude one. If the list does, the excluded protocols get
    // separate lists in front, which decide about all of their packets. The rest can then use "any".
    let excepted = excepted(list);
    let mut rows = Vec::new();
    for protocol in excepted.iter() {
        let own = Protocols::of(&[protocol]);
        for decision in list.iter().filter(|decision| decision.region.protocols.contains(protocol)) {
            rows.push(row(decision, u16::from(protocol.0)));
            if is_about_all(decision, own) {
                break;
            }
        }
    }
    let rest = excepted.not();
    let mut common = Vec::new();
    for decision in list {
        let protocols = decision.region.protocols.and(rest);
        if protocols == rest {
            common.push(row(decision, ANY_PROTOCOL));
        } else {
            common.extend(protocols.iter().map(|Protocol(number)| row(decision, number.into())));
        }
        if is_about_all(decision, rest) {
            break;
        }
    }
    // The endpoint is closed after these rows anyway.
    while common.last().is_some_and(|row| row.action == AclAction::Block) {
        common.pop();
    }
    rows.extend(common);
    rows
}

fn is_about_all(decision: &Decision, protocols: Protocols) -> bool {
    let Decision { region, .. } = decision;
    let sides = [&region.local, &region.remote];
    protocols.is_within(region.protocols)
        && sides.iter().all(|side| side.addresses.is_all() && side.ports.is_all())
}

/// The protocols that are excluded where most are meant.
fn excepted(list: &[Decision]) -> Protocols {
    let named = |decision: &Decision| decision.region.protocols;
    // A protocol that no decision distinguishes represents all unmentioned ones.
    let few = |protocols: Protocols| protocols.iter().count() <= 128;
    let mentioned = list.iter().map(named).fold(Protocols::NONE, |all, protocols| {
        all.or(if few(protocols) { protocols } else { protocols.not() })
    });
    let Some(other) = mentioned.not().iter().last() else {
        // Every single protocol is distinguished, so each gets its own list.
        return Protocols::ALL;
    };
    let broad = list.iter().map(named).filter(|protocols| protocols.contains(other));
    broad.fold(Protocols::NONE, |all, protocols| all.or(protocols.not()))
}

/// The decision about one protocol.
pub(super) fn row(decision: &Decision, protocol: u16) -> Row {
    let Decision { region, verdict, origin } = decision;
    let action = match verdict {
        Verdict::Allow => AclAction::Allow,
        Verdict::Deny => AclAction::Block,
    };
    let (local, remote) = (region.local.clone(), region.remote.clone());
    Row { action, protocol, local, remote, origin: Arc::clone(origin) }
}
