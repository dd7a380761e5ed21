//! Which subnets a node takes, whether it still has them, and when it renews them: pure functions of what etcd has and of time.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use ipnet::IpNet;

use crate::config::SubnetRange;
use crate::lease::{Attributes, Subnets};
use crate::ranges::Ranges;
use crate::view::View;

/// How many free subnets a node chooses from, as flanneld.
const CHOICE: usize = 100;

/// The subnets that a node had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Previous {
    /// The subnets.
    pub subnets: Subnets,
    /// Whether pods of the node have addresses of them.
    pub has_pods: bool,
    /// The address that the node had then.
    pub address: Option<Ipv4Addr>,
}

/// How a node gets its subnets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Acquisition {
    /// A key has the node's own address: it goes on with it.
    Reuse(Subnets),
    /// The key does not exist.
    Create(Subnets),
    /// Somebody else has the subnets, and pods of the node still have addresses of them. The node gets no others before these pods
    /// are gone.
    Wait(Subnets),
}

/// What a node has written about its subnets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnLease {
    /// The subnets.
    pub subnets: Subnets,
    /// What was written last.
    pub attributes: Attributes,
    /// The revision of the node's last write of its key.
    pub written: Option<u64>,
    /// Whether the node has, since the last renewal, replaced what somebody else had written with the node's address.
    pub replaced: bool,
}

/// Whether a node's key is its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LeaseState {
    /// The key is as it was written.
    Held,
    /// Somebody has written the key, with the node's own address.
    Rewritten,
    /// The key does not exist, and nobody else has the subnets.
    Gone,
    /// Somebody else has the subnets, or a part of them. The text names the owner.
    Lost(String),
}

/// How a node with these attributes gets its subnets: those that its pods have; those that it has; those that it had; free ones, by a
/// random number.
///
/// # Errors
/// No subnet is free. The text has the remedy.
pub fn acquisition(
    view: &View,
    ranges: &Ranges,
    own: &Attributes,
    previous: Option<Previous>,
    random: u64,
) -> Result<Acquisition, String> {
    let is_own = |subnets: &Subnets| {
        let holder = view.of(subnets).and_then(|seen| seen.holder());
        ranges.contain(subnets) && holder.is_some_and(|holder| holder.public_ip == own.public_ip)
    };
    // The address of a node may change while its agent is down. Another machine with the former one has another way to its pods.
    let was_own = |Previous { subnets, address, .. }: &Previous| {
        let Some(public_ip) = *address else { return false };
        let holder = view.of(subnets).and_then(|seen| seen.holder());
        let ways = own.leases(subnets);
        holder.is_some_and(|holder| {
            let mut pairs = holder.leases.iter().zip(&ways);
            holder.public_ip == public_ip
                && !ways.is_empty()
                && holder.leases.len() == ways.len()
                && pairs.all(|(lease, way)| lease.backend == way.backend)
        })
    };
    let fitting = previous.filter(|previous| ranges.contain(&previous.subnets));
    if let Some(Previous { subnets, .. }) = fitting.filter(|one| is_own(&one.subnets) || was_own(one)) {
        return Ok(Acquisition::Reuse(subnets));
    }
    let is_free = |subnets: &Subnets| !view.taken().any(|(taken, _)| taken.overlap(subnets));
    if let Some(Previous { subnets, .. }) = fitting.filter(|previous| previous.has_pods) {
        return Ok(if is_free(&subnets) { Acquisition::Create(subnets) } else { Acquisition::Wait(subnets) });
    }
    if let Some((subnets, _)) = view.taken().find(|(subnets, _)| is_own(subnets)) {
        return Ok(Acquisition::Reuse(subnets));
    }
    if let Some(Previous { subnets, .. }) = fitting.filter(|previous| is_free(&previous.subnets)) {
        return Ok(Acquisition::Create(subnets));
    }
    let taken: BTreeSet<IpNet> =
        view.taken().flat_map(|(subnets, _)| subnets.nets().collect::<Vec<_>>()).collect();
    let IpNet::V4(v4) = free(&ranges.v4, &taken, random)? else { return Err(full("Network")) };
    let v6 = match &ranges.v6 {
        None => None,
        Some(range) => match free(range, &taken, random.rotate_left(32))? {
            IpNet::V6(v6) => Some(v6),
            IpNet::V4(_) => return Err(full("IPv6Network")),
        },
    };
    Ok(Acquisition::Create(Subnets { v4, v6 }))
}

fn free(range: &SubnetRange, taken: &BTreeSet<IpNet>, random: u64) -> Result<IpNet, String> {
    let free: Vec<IpNet> = range.free(taken).take(CHOICE).collect();
    let count = u64::try_from(free.len()).unwrap_or(u64::MAX);
    let chosen = random.checked_rem(count).and_then(|index| free.get(usize::try_from(index).ok()?));
    chosen.copied().ok_or_else(|| full(if range.is_v6() { "IPv6Network" } else { "Network" }))
}

fn full(field: &str) -> String {
    format!(
        "no subnet of {field} is free; remove the keys of nodes that are gone, or enlarge {field} or SubnetMax in flannel's configuration"
    )
}

/// Whether a node's key is its own.
#[must_use]
pub fn lease_state(view: &View, own_lease: &OwnLease) -> LeaseState {
    let OwnLease { subnets, attributes, written, replaced } = own_lease;
    let Some(seen) = view.of(subnets) else {
        return overlapped(view, own_lease).map_or(LeaseState::Gone, LeaseState::Lost);
    };
    if *written == Some(seen.revision) {
        return LeaseState::Held;
    }
    match seen.holder() {
        None => LeaseState::Lost("its value cannot be read".to_owned()),
        Some(holder) if holder.public_ip != attributes.public_ip => {
            LeaseState::Lost(format!("{} has it", holder.public_ip))
        }
        // The answer to the write was lost; or it is of a machine that nobody can tell from this one.
        Some(holder) if holder.leases == attributes.leases(subnets) => LeaseState::Held,
        // Both would write it again and again, and give the same addresses.
        Some(_) if *replaced => LeaseState::Lost(format!(
            "somebody else writes it, too, with the node's address {}",
            attributes.public_ip
        )),
        Some(_) => LeaseState::Rewritten,
    }
}

/// Which key of somebody else overlaps a node's subnets. The text names the key and its owner.
#[must_use]
pub fn overlapped(view: &View, own_lease: &OwnLease) -> Option<String> {
    let (taken, seen) = view.taken().find(|(taken, seen)| {
        *taken != own_lease.subnets
            && seen.fits
            && taken.overlap(&own_lease.subnets)
            && seen.holder().is_none_or(|holder| holder.public_ip != own_lease.attributes.public_ip)
    })?;
    let by =
        seen.holder().map_or("a value that cannot be read".to_owned(), |holder| holder.public_ip.to_string());
    Some(format!("{} ({by}) overlaps it", view.key(&taken)))
}

/// When a lease that was asked for at a moment is renewed: well before its end, so that etcd may be down for long. Never, if the key is
/// somebody else's.
#[must_use]
pub fn renewal(lease_state: &LeaseState, asked: Instant, lasts: Duration) -> Option<Instant> {
    match lease_state {
        LeaseState::Lost(_) => None,
        LeaseState::Held | LeaseState::Rewritten | LeaseState::Gone => Some(asked + lasts / 3),
    }
}

/// Whether a lease that was asked for at a moment may have ended.
#[must_use]
pub fn has_ended(asked: Instant, lasts: Duration, now: Instant) -> bool {
    now >= asked + lasts
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tortie_api::net::MacAddress;
    use tortie_store::etcd::Entry;

    use super::*;
    use crate::config::NetConf;
    use crate::lease::Tunnel;

    const OWN: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

    fn view(entries: &[(&str, &str)]) -> View {
        let mut view = View::new("/n/subnets/".to_owned(), ranges(true));
        let entry = |(revision, (name, address)): (usize, &(&str, &str))| {
            let value = json!({"PublicIP": address, "PublicIPv6": "2001:db8::1", "BackendType": "host-gw"})
                .to_string();
            let value = if address.is_empty() { String::new() } else { value };
            Entry { key: format!("/n/subnets/{name}"), value, revision: revision as u64 + 1, has_lease: true }
        };
        view.reset(entries.iter().enumerate().map(entry).collect());
        view
    }

    fn ranges(is_dual: bool) -> Ranges {
        let conf = json!({
            "Network": "10.5.0.0/16", "SubnetMin": "10.5.1.0", "SubnetMax": "10.5.3.0", "EnableIPv6": is_dual,
            "IPv6Network": "fd00::/48", "IPv6SubnetMax": "fd00:0:0:2::", "Backend": {"Type": "host-gw"},
        });
        Ranges::new(&NetConf::parse(&conf.to_string()).unwrap()).unwrap()
    }

    /// The possible results for all random numbers.
    fn acquisitions(view: &View, ranges: &Ranges, previous: Option<&str>) -> BTreeSet<String> {
        acquisitions_of(view, ranges, previous, false)
    }

    fn acquisitions_of(
        view: &View,
        ranges: &Ranges,
        previous: Option<&str>,
        has_pods: bool,
    ) -> BTreeSet<String> {
        let previous = previous.map(|name| Previous {
            subnets: Subnets::of_key_name(name).unwrap(),
            has_pods,
            address: None,
        });
        let own = own_lease("10.5.1.0-24", None).attributes;
        let acquired = |random: u64| match acquisition(view, ranges, &own, previous, random) {
            Ok(Acquisition::Reuse(subnets)) => format!("reuse {}", subnets.key_name()),
            Ok(Acquisition::Create(subnets)) => format!("create {}", subnets.key_name()),
            Ok(Acquisition::Wait(subnets)) => format!("wait for {}", subnets.key_name()),
            Err(problem) => problem.split(';').next().unwrap_or_default().to_owned(),
        };
        (0..30_u64).map(|random| acquired(random | (random / 5) << 32)).collect()
    }

    #[test]
    fn a_node_takes_what_it_has_then_what_it_had_then_what_is_free() {
        let all = ["create 10.5.1.0-24", "create 10.5.2.0-24", "create 10.5.3.0-24"];
        for (taken, previous, expected) in [
            (&[][..], None, &all[..]),
            (&[], Some("10.5.2.0-24"), &all[1..2]),
            // Another network, length or family than the configuration has.
            (&[], Some("10.6.2.0-24"), &all),
            (&[], Some("10.5.0.0-24"), &all),
            (&[], Some("10.5.2.0-25"), &all),
            (&[], Some("10.5.2.0-24&fd00:0:0:1::-64"), &all),
            (&[("10.5.2.0-24", "192.0.2.1")], None, &["reuse 10.5.2.0-24"]),
            (&[("10.5.2.0-24", "192.0.2.1")], Some("10.5.3.0-24"), &["reuse 10.5.2.0-24"]),
            (
                &[("10.5.2.0-24", "192.0.2.1"), ("10.5.3.0-24", "192.0.2.1")],
                Some("10.5.3.0-24"),
                &["reuse 10.5.3.0-24"],
            ),
            (&[("10.6.2.0-24", "192.0.2.1")], None, &all),
            (
                &[("10.5.2.0-24", "192.0.2.9")],
                Some("10.5.2.0-24"),
                &["create 10.5.1.0-24", "create 10.5.3.0-24"],
            ),
            // Also keys with values that cannot be read, and subnets of other lengths.
            (&[("10.5.2.0-24", ""), ("10.5.1.128-25", "192.0.2.9")], None, &all[2..]),
            (&[("10.5.2.0-23", "192.0.2.9")], Some("10.5.3.0-24"), &all[..1]),
            (&[("10.5.0.0-16", "192.0.2.9")], Some("10.5.3.0-24"), &["no subnet of Network is free"]),
        ] {
            let found = acquisitions(&view(taken), &ranges(false), previous);
            assert_eq!(
                found.iter().map(String::as_str).collect::<Vec<_>>(),
                expected,
                "{taken:?} {previous:?}"
            );
        }
    }

    /// Their addresses would be those of pods of two nodes, and nothing would say so any more.
    #[test]
    fn a_node_whose_pods_have_the_subnet_of_another_one_gets_no_other() {
        let own = "10.5.2.0-24";
        for (taken, has_pods, expected) in [
            (&[][..], true, &["create 10.5.2.0-24"][..]),
            (&[(own, "192.0.2.9")], true, &["wait for 10.5.2.0-24"]),
            (&[(own, "")], true, &["wait for 10.5.2.0-24"]),
            (&[("10.5.0.0-20", "192.0.2.9")], true, &["wait for 10.5.2.0-24"]),
            (&[(own, "192.0.2.9")], false, &["create 10.5.1.0-24", "create 10.5.3.0-24"]),
            (&[(own, "192.0.2.1")], true, &["reuse 10.5.2.0-24"]),
            // Also if the address of the node has another one: nobody would keep that of its pods.
            (&[(own, "192.0.2.9"), ("10.5.1.0-24", "192.0.2.1")], true, &["wait for 10.5.2.0-24"]),
            (&[("10.5.1.0-24", "192.0.2.1")], true, &["create 10.5.2.0-24"]),
            (&[("10.5.1.0-24", "192.0.2.1")], false, &["reuse 10.5.1.0-24"]),
        ] {
            let found = acquisitions_of(&view(taken), &ranges(false), Some(own), has_pods);
            assert_eq!(
                found.iter().map(String::as_str).collect::<Vec<_>>(),
                expected,
                "{taken:?} {has_pods}"
            );
        }
    }

    /// The node need not wait a day for the end of its own lease.
    #[test]
    fn a_node_with_another_address_goes_on_with_its_subnet() {
        let name = "10.5.2.0-24";
        let subnets = Subnets::of_key_name(name).unwrap();
        let former = "192.0.2.9".parse().unwrap();
        let vxlan = |mac: u8| Attributes {
            tunnel: Tunnel::Vxlan { vni: 1, macs: [MacAddress([0x66, 0, 0, 0, 0, mac]); 2] },
            public_ipv6: None,
            public_ip: OWN,
        };
        let host_gw = Attributes { tunnel: Tunnel::HostGw, ..vxlan(1) };
        let pending = Attributes { tunnel: Tunnel::Pending, ..vxlan(1) };
        let (reuse, wait) = (Acquisition::Reuse(subnets), Acquisition::Wait(subnets));
        for (written, own, address, expected) in [
            (vxlan(1), vxlan(1), Some(former), reuse),
            (host_gw, host_gw, Some(former), reuse),
            // Another machine has the former address, or the address was another one.
            (vxlan(2), vxlan(1), Some(former), wait),
            (vxlan(1), vxlan(1), Some(Ipv4Addr::new(192, 0, 2, 8)), wait),
            (vxlan(1), vxlan(1), None, wait),
            (host_gw, vxlan(1), Some(former), wait),
            // Nothing tells the reservations of two machines apart.
            (pending, pending, Some(former), wait),
        ] {
            let value = Attributes { public_ip: former, ..written }.value();
            let mut view = view(&[]);
            view.reset(vec![Entry {
                key: format!("/n/subnets/{name}"),
                value,
                revision: 1,
                has_lease: true,
            }]);
            let previous = Some(Previous { subnets, has_pods: true, address });
            assert_eq!(
                acquisition(&view, &ranges(false), &own, previous, 0),
                Ok(expected),
                "{written:?} {address:?}"
            );
        }
    }

    #[test]
    fn nodes_with_both_families_share_neither_subnet() {
        let (all, none) = (view(&[]), ranges(true));
        assert_eq!(acquisitions(&all, &none, None).len(), 6);
        let one = view(&[("10.5.1.0-24&fd00:0:0:1::-64", "192.0.2.9"), ("10.5.2.0-24", "192.0.2.8")]);
        let expected = ["create 10.5.3.0-24&fd00:0:0:2::-64".to_owned()];
        assert_eq!(acquisitions(&one, &none, None), expected.clone().into());
        assert_eq!(acquisitions(&one, &none, Some("10.5.3.0-24&fd00:0:0:1::-64")), expected.into());
        let full = view(&[
            ("10.5.1.0-24&fd00:0:0:1::-64", "192.0.2.9"),
            ("10.5.2.0-24&fd00:0:0:2::-64", "192.0.2.8"),
        ]);
        assert_eq!(acquisitions(&full, &none, None), ["no subnet of IPv6Network is free".to_owned()].into());
        // The families have changed since.
        let former = view(&[("10.5.1.0-24", "192.0.2.1")]);
        assert!(acquisitions(&former, &none, None).iter().all(|one| one.starts_with("create 10.5.")));
    }

    fn own_lease(name: &str, written: Option<u64>) -> OwnLease {
        let attributes = Attributes {
            public_ip: OWN,
            public_ipv6: Some("2001:db8::1".parse().unwrap()),
            tunnel: Tunnel::HostGw,
        };
        OwnLease { subnets: Subnets::of_key_name(name).unwrap(), attributes, written, replaced: false }
    }

    #[test]
    fn a_lease_is_held_until_somebody_else_writes_it() {
        let own = "10.5.2.0-24";
        let lost = |text: &str| LeaseState::Lost(text.to_owned());
        for (entries, written, expected) in [
            (&[(own, "192.0.2.1")][..], Some(1), LeaseState::Held),
            // The answer to the write was lost.
            (&[(own, "192.0.2.1")], Some(7), LeaseState::Held),
            (&[(own, "192.0.2.1")], None, LeaseState::Held),
            // The node has another address since.
            (&[(own, "192.0.2.8")], Some(1), LeaseState::Held),
            (&[], Some(1), LeaseState::Gone),
            (&[("10.5.3.0-24", "192.0.2.9")], Some(1), LeaseState::Gone),
            (&[(own, "192.0.2.9")], Some(7), lost("192.0.2.9 has it")),
            (&[(own, "")], Some(7), lost("its value cannot be read")),
            (&[(own, "")], Some(1), LeaseState::Held),
        ] {
            assert_eq!(
                lease_state(&view(entries), &own_lease(own, written)),
                expected,
                "{entries:?} {written:?}"
            );
        }
    }

    /// A node whose key is renewed keeps its pods, whatever others write beside it.
    #[test]
    fn an_overlapping_key_takes_the_own_one_from_nobody() {
        let (own, other) = ("10.5.2.0-24&fd00:0:0:1::-64", "10.5.2.0-24&fd00:0:0:2::-64");
        let overlap = "/n/subnets/10.5.2.0-24&fd00:0:0:2::-64 (192.0.2.9) overlaps it";
        for (entries, expected, expected_overlap) in [
            (&[(own, "192.0.2.1"), (other, "192.0.2.9")][..], LeaseState::Held, Some(overlap)),
            (&[(other, "192.0.2.9")], LeaseState::Lost(overlap.to_owned()), Some(overlap)),
            (&[(own, "192.0.2.1"), (other, "192.0.2.1")], LeaseState::Held, None),
            // Keys that are no subnets of flannel's configuration have no effect.
            (&[(own, "192.0.2.1"), ("10.5.0.0-16", "")], LeaseState::Held, None),
            (&[(own, "192.0.2.1"), ("0.0.0.0-0", "192.0.2.9")], LeaseState::Held, None),
            (&[(own, "192.0.2.1"), ("10.5.2.0-25", "192.0.2.9")], LeaseState::Held, None),
            (&[("10.5.0.0-20", "192.0.2.9")], LeaseState::Gone, None),
        ] {
            let (view, own_lease) = (view(entries), own_lease(own, Some(1)));
            assert_eq!(lease_state(&view, &own_lease), expected, "{entries:?}");
            assert_eq!(overlapped(&view, &own_lease).as_deref(), expected_overlap, "{entries:?}");
        }
    }

    /// Otherwise, two machines with one address write for ever, and give the same addresses.
    #[test]
    fn what_others_write_with_the_address_of_the_node_is_replaced_once() {
        let own = "10.5.2.0-24";
        let mut view = view(&[]);
        let value = json!({"PublicIP": "192.0.2.1", "BackendType": "udp"}).to_string();
        view.reset(vec![Entry { key: format!("/n/subnets/{own}"), value, revision: 9, has_lease: true }]);
        let mut own_lease = own_lease(own, Some(1));
        assert_eq!(lease_state(&view, &own_lease), LeaseState::Rewritten);
        own_lease.replaced = true;
        let lost = lease_state(&view, &own_lease);
        assert!(
            matches!(&lost, LeaseState::Lost(by) if by.contains("somebody else writes it, too")),
            "{lost:?}"
        );
    }

    #[test]
    fn a_lease_is_renewed_long_before_its_end() {
        let (asked, day) = (Instant::now(), Duration::from_secs(24 * 3600));
        let due = asked + Duration::from_secs(8 * 3600);
        assert_eq!(renewal(&LeaseState::Held, asked, day), Some(due));
        // It would be due for ever.
        assert_eq!(renewal(&LeaseState::Lost(String::new()), asked, day), None);
        assert!(!has_ended(asked, day, due));
        assert!(!has_ended(asked, day, asked + day - Duration::from_secs(1)));
        assert!(has_ended(asked, day, asked + day));
    }
}
