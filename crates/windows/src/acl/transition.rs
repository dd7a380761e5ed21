//! The changes from an endpoint's current ACLs to the desired ones.

use std::collections::{BTreeSet, HashSet};
use std::net::Ipv6Addr;

use ipnet::Ipv6Net;
use tortie_hcn::schema::{Acl, Extra};

use super::decision_rows::ANY_PROTOCOL;

/// Two steps: first all of `add`, then all of `remove`.
///
/// In between, the endpoint has both lists at once. **Every packet is treated as by one of them**: in each list all
/// ACLs of a priority have one action, and a list covers every packet, so a packet's first match in the union is its
/// first match in one of the lists. What both deny stays denied, and what both allow stays allowed (policy decision
/// 23). This also holds for every prefix of `add` and of `remove`: ACLs are added from the front and removed from the
/// back.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Transition {
    /// Missing ACLs, the earliest first.
    pub add: Vec<Acl>,
    /// Superfluous ACLs, the latest first.
    pub remove: Vec<Acl>,
}

impl Transition {
    /// Whether there is nothing to do.
    pub(crate) fn is_empty(&self) -> bool {
        self.add.is_empty() && self.remove.is_empty()
    }
}

/// The smallest change that makes `actual` equal to `desired`, in whatever order and [form](normal) each is written.
pub(crate) fn transition(actual: &[Acl], desired: &[Acl]) -> Transition {
    let missing_in = |list: &[Acl], acls: &[Acl]| -> Vec<Acl> {
        let there: HashSet<Acl> = list.iter().map(normal).collect();
        let mut missing: Vec<Acl> =
            acls.iter().filter(|acl| !there.contains(&normal(acl))).cloned().collect();
        missing.sort_by_key(|acl| acl.priority);
        missing
    };
    let add = missing_in(actual, desired);
    let mut remove = missing_in(desired, actual);
    remove.reverse();
    Transition { add, remove }
}

/// The ACL in a form that identifies it even if HNS has dropped its id.
pub(crate) fn anonymous(acl: &Acl) -> Acl {
    Acl { id: String::new(), ..normal(acl) }
}

/// The ACL in a form that identifies it whatever its priority.
pub(super) fn unnumbered(acl: &Acl) -> Acl {
    Acl { priority: 0, ..normal(acl) }
}

/// The ACL in one of the many forms with the same meaning: HNS may return another form than it got.
fn normal(acl: &Acl) -> Acl {
    let ports = |part: &str| match part.split_once('-') {
        Some((first, last)) if first == last => first.to_owned(),
        _ => part.to_owned(),
    };
    let address = |part: &str| canonical_address(part);
    let protocols = sorted(&acl.protocols, str::to_owned);
    Acl {
        protocols: if protocols == ANY_PROTOCOL.to_string() { String::new() } else { protocols },
        local_addresses: sorted(&acl.local_addresses, address),
        remote_addresses: sorted(&acl.remote_addresses, address),
        local_ports: sorted(&acl.local_ports, ports),
        remote_ports: sorted(&acl.remote_ports, ports),
        // Unknown members do not matter.
        extra: Extra::new(),
        ..acl.clone()
    }
}

/// The address or network in the form in which Tortie writes it: an address has no length.
pub(crate) fn canonical_address(text: &str) -> String {
    if !text.contains(':') {
        return text.strip_suffix("/32").unwrap_or(text).to_owned();
    }
    // IPv6 has several forms of an address.
    match text.parse::<Ipv6Net>().or_else(|_| text.parse::<Ipv6Addr>().map(Ipv6Net::from)) {
        Ok(net) if net.prefix_len() == net.max_prefix_len() => net.addr().to_string(),
        Ok(net) => net.to_string(),
        Err(_) => text.to_owned(),
    }
}

/// A comma-separated list without order and duplicates.
fn sorted(list: &str, part: impl Fn(&str) -> String) -> String {
    let parts: BTreeSet<String> = list.split(',').map(|text| part(text.trim())).collect();
    parts.into_iter().collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use tortie_hcn::schema::lenient;

    use super::*;

    fn acl(protocols: &str, addresses: &str, ports: &str, more: &str) -> Acl {
        let text = format!(
            r#"{{"Id": "tortie/x", "Protocols": "{protocols}", "RemoteAddresses": "{addresses}", "LocalPorts": "{ports}",
                "RuleType": "Switch", "Priority": 1000{more}}}"#
        );
        lenient(&text).unwrap()
    }

    #[test]
    fn equivalent_acls_need_no_transition() {
        let ours = acl("256", "10.0.0.1,10.1.0.0/16", "80,8000-8080", "");
        let same = acl(
            "",
            "10.1.0.0/16, 10.0.0.1/32,10.0.0.1",
            "8000-8080,80-80",
            r#", "Stats": 1, "Action": "Allow""#,
        );
        assert!(transition(std::slice::from_ref(&same), std::slice::from_ref(&ours)).is_empty());
        let others = [
            acl("6", "10.0.0.1,10.1.0.0/16", "80,8000-8080", ""),
            acl("256", "10.0.0.1,10.1.0.0/15", "80,8000-8080", ""),
            acl("256", "", "80,8000-8080", ""),
            acl("256", "10.0.0.1,10.1.0.0/16", "80", ""),
            acl("256", "10.0.0.1,10.1.0.0/16", "80,8000-8080", r#", "Action": "Block""#),
        ];
        for other in others {
            let step = transition(std::slice::from_ref(&other), std::slice::from_ref(&ours));
            assert_eq!(step, Transition { add: vec![ours.clone()], remove: vec![other] });
        }
        // An address of IPv6 is no network that begins with it.
        for (one, other, is_same) in [
            ("2001:db8::/32", "2001:db8::", false),
            ("2001:db8::1/128", "2001:db8::1", true),
            ("FD00:0::1", "fd00::1", true),
            ("10.0.0.0/32", "10.0.0.0/31", false),
        ] {
            let [one, other] = [one, other].map(|addresses| acl("6", addresses, "80", ""));
            let step = transition(std::slice::from_ref(&one), std::slice::from_ref(&other));
            assert_eq!(step.add.is_empty(), is_same, "{one:?} {other:?}");
        }
        // ACLs to remove are named as they were read.
        assert_eq!(transition(std::slice::from_ref(&same), &[]).remove, [same]);
    }
}
