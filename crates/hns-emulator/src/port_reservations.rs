//! Reservations of the node's ports for guest network services (`HcnReserveGuestNetworkServicePort` and its relatives in the HCN
//! reference). They have no effect but on each other.
//!
//! No source says what HNS refuses. Here a port that somebody has exclusively is given to nobody else, and one that is shared to those
//! who share it. A range has a port more than its count, because WSL asserts so (microsoft/WSL, `GuestNetworkService.cpp`), is for both
//! protocols, and comes from the dynamic ports.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tortie_hcn::{Failure, Guid, HResult};

use crate::check::fail;

/// The dynamic ports.
const DYNAMIC: std::ops::RangeInclusive<u16> = 49_152..=65_535;
/// `HCN_PORT_PROTOCOL`: bits for TCP and UDP.
const BOTH: u32 = 3;
/// `HCN_PORT_ACCESS`.
const EXCLUSIVE: u32 = 1;
const SHARED: u32 = 2;

/// A request for one port.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct PortRequest {
    pub(crate) service: Guid,
    protocol: u32,
    access: u32,
    port: u16,
}

/// A request for a range of ports.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct RangeRequest {
    pub(crate) service: Guid,
    count: u16,
}

/// A reservation, with the members of `HCN_PORT_RANGE_ENTRY` that sources explain. Both ports belong to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct Reservation {
    #[serde(skip)]
    service: Guid,
    /// The virtual machine.
    target_partition_id: Guid,
    protocol: u32,
    pub(crate) starting_port: u16,
    pub(crate) ending_port: u16,
    #[serde(skip)]
    access: u32,
}

impl Reservation {
    fn excludes(&self, other: &Reservation) -> bool {
        self.protocol & other.protocol != 0
            && self.starting_port <= other.ending_port
            && other.starting_port <= self.ending_port
            && (self.access == EXCLUSIVE || other.access == EXCLUSIVE)
    }
}

/// The reservations by their handles. A reservation ends with its service; its handle is open until it is released.
#[derive(Default)]
pub(crate) struct PortReservations {
    open: BTreeMap<u64, Option<Reservation>>,
}

impl PortReservations {
    /// The reservation of one port, if it can be had.
    pub(crate) fn port(&self, request: &PortRequest, machine: Guid) -> Result<Reservation, Failure> {
        let PortRequest { service, protocol, access, port } = *request;
        if !(1..=BOTH).contains(&protocol) || ![EXCLUSIVE, SHARED].contains(&access) || port == 0 {
            let error = format!("protocol {protocol}, access {access}, port {port} of a reservation");
            return fail(HResult::E_INVALIDARG, error);
        }
        let reservation = Reservation {
            service,
            target_partition_id: machine,
            protocol,
            starting_port: port,
            ending_port: port,
            access,
        };
        match self.all().find(|other| other.excludes(&reservation)) {
            Some(other) => {
                fail(HResult::HCN_E_PORT_ALREADY_EXISTS, format!("port {port} is reserved: {other:?}"))
            }
            None => Ok(reservation),
        }
    }

    /// The first free range of dynamic ports.
    pub(crate) fn range(&self, request: &RangeRequest, machine: Guid) -> Result<Reservation, Failure> {
        let RangeRequest { service, count } = *request;
        if count == 0 {
            return fail(HResult::E_INVALIDARG, "a range of no ports");
        }
        let at = |starting_port: u16| {
            let ending_port = starting_port.checked_add(count)?;
            let (protocol, access) = (BOTH, EXCLUSIVE);
            let target_partition_id = machine;
            Some(Reservation { service, target_partition_id, protocol, starting_port, ending_port, access })
        };
        let is_free = |range: &Reservation| !self.all().any(|other| other.excludes(range));
        // A free range begins where another one ends, or at the first port.
        let after = self.all().filter_map(|other| other.ending_port.checked_add(1));
        let starts = std::iter::once(*DYNAMIC.start()).chain(after).filter(|start| DYNAMIC.contains(start));
        match starts.filter_map(at).filter(is_free).min_by_key(|range| range.starting_port) {
            Some(range) => Ok(range),
            None => fail(HResult::HCN_E_PORT_ALREADY_EXISTS, format!("no {count} ports in a row are free")),
        }
    }

    pub(crate) fn open(&mut self, handle: u64, reservation: Reservation) {
        self.open.insert(handle, Some(reservation));
    }

    pub(crate) fn release(&mut self, handle: u64) -> Result<(), Failure> {
        match self.open.remove(&handle) {
            Some(_) => Ok(()),
            None => fail(HResult::E_INVALIDARG, format!("{handle} is no open handle of a reservation")),
        }
    }

    /// Ends the reservations of a service.
    pub(crate) fn end(&mut self, service: Guid) {
        for reservation in self.open.values_mut() {
            reservation.take_if(|it| it.service == service);
        }
    }

    /// How many handles are open.
    pub(crate) fn count(&self) -> usize {
        self.open.len()
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Reservation> {
        self.open.values().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TCP: u32 = 1;
    const UDP: u32 = 2;

    #[test]
    fn a_port_is_for_one_or_for_those_who_share_it() {
        for (first, second, fits) in [
            ((TCP, EXCLUSIVE, 80), (TCP, EXCLUSIVE, 80), false),
            ((TCP, EXCLUSIVE, 80), (TCP, SHARED, 80), false),
            ((TCP, SHARED, 80), (TCP, EXCLUSIVE, 80), false),
            ((TCP, SHARED, 80), (TCP, SHARED, 80), true),
            ((TCP, EXCLUSIVE, 80), (UDP, EXCLUSIVE, 80), true),
            ((BOTH, EXCLUSIVE, 80), (UDP, EXCLUSIVE, 80), false),
            ((TCP, EXCLUSIVE, 80), (TCP, EXCLUSIVE, 81), true),
            ((TCP, EXCLUSIVE, 80), (0, EXCLUSIVE, 81), false),
            ((TCP, EXCLUSIVE, 80), (4, EXCLUSIVE, 81), false),
            ((TCP, EXCLUSIVE, 80), (TCP, 3, 81), false),
            ((TCP, EXCLUSIVE, 80), (TCP, SHARED, 0), false),
        ] {
            let port = |(protocol, access, port)| PortRequest { service: Guid::ZERO, protocol, access, port };
            let mut reservations = PortReservations::default();
            reservations.open(1, reservations.port(&port(first), Guid::ZERO).unwrap());
            let tried = reservations.port(&port(second), Guid::ZERO);
            assert_eq!(tried.is_ok(), fits, "{first:?} {second:?}: {tried:?}");
            reservations.release(1).unwrap();
            assert!(reservations.release(1).is_err(), "a handle is released once");
            assert_eq!(reservations.port(&port(first), Guid::ZERO).map(|it| it.starting_port), Ok(80));
        }
    }

    #[test]
    fn ranges_do_not_overlap_and_end() {
        let mut reservations = PortReservations::default();
        let (one, other) = (Guid::random(), Guid::random());
        let range = |reservations: &PortReservations, service, count| {
            reservations.range(&RangeRequest { service, count }, Guid::ZERO)
        };
        let port = PortRequest { service: one, protocol: UDP, access: SHARED, port: 49_200 };
        reservations.open(1, reservations.port(&port, Guid::ZERO).unwrap());
        for (handle, service, count, expected) in [
            (2, one, 100, (49_201, 49_301)),
            (3, other, 10, (49_152, 49_162)),
            (4, one, 16_233, (49_302, 65_535)),
        ] {
            let found = range(&reservations, service, count).unwrap();
            assert_eq!((found.starting_port, found.ending_port), expected);
            reservations.open(handle, found);
        }
        assert_eq!(range(&reservations, one, 0).unwrap_err().code, HResult::E_INVALIDARG);
        let none = range(&reservations, one, 40).unwrap_err();
        assert_eq!(none.code, HResult::HCN_E_PORT_ALREADY_EXISTS);
        reservations.end(one);
        assert_eq!(reservations.all().map(|it| it.starting_port).collect::<Vec<_>>(), [49_152]);
        assert_eq!(reservations.count(), 4, "handles stay open");
        assert_eq!(range(&reservations, one, 40).unwrap().starting_port, 49_163);
    }
}
