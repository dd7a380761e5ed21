//! Reservations of ports as C has them (`HCN_PORT_RANGE_ENTRY` and `HCN_PORT_RANGE_RESERVATION` of `ComputeNetwork.h`).

use serde::Deserialize;
use tortie_hcn::Guid;

use crate::guid::RawGuid;

/// The first and the last port of a reservation.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PortRange {
    pub(crate) starting_port: u16,
    pub(crate) ending_port: u16,
}

/// A reservation in the list of all. What the emulated HNS does not say is zero: no source explains it.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PortRangeEntry {
    owning_partition_id: RawGuid,
    target_partition_id: RawGuid,
    protocol: u32,
    priority: u64,
    reservation_type: u32,
    sharing_flags: u32,
    delivery_mode: u32,
    starting_port: u16,
    ending_port: u16,
}

/// A reservation that was made.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct Reserved {
    pub(crate) handle: usize,
    starting_port: u16,
    ending_port: u16,
}

impl Reserved {
    pub(crate) fn range(&self) -> PortRange {
        PortRange { starting_port: self.starting_port, ending_port: self.ending_port }
    }
}

/// Reads the list of reservations of the emulated HNS.
///
/// # Errors
/// It is no such list.
pub(crate) fn entries(answer: &str) -> Result<Box<[PortRangeEntry]>, serde_json::Error> {
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Listed {
        target_partition_id: Guid,
        protocol: u32,
        starting_port: u16,
        ending_port: u16,
    }
    let listed: Vec<Listed> = serde_json::from_str(answer)?;
    let entry = |it: Listed| PortRangeEntry {
        owning_partition_id: Guid::ZERO.into(),
        target_partition_id: it.target_partition_id.into(),
        protocol: it.protocol,
        priority: 0,
        reservation_type: 0,
        sharing_flags: 0,
        delivery_mode: 0,
        starting_port: it.starting_port,
        ending_port: it.ending_port,
    };
    Ok(listed.into_iter().map(entry).collect())
}

#[cfg(test)]
mod tests {
    use std::mem::{offset_of, size_of};

    use serde_json::json;

    use super::*;

    #[test]
    fn entries_are_laid_out_as_in_the_header() {
        let offsets = [
            offset_of!(PortRangeEntry, target_partition_id),
            offset_of!(PortRangeEntry, protocol),
            offset_of!(PortRangeEntry, priority),
            offset_of!(PortRangeEntry, reservation_type),
            offset_of!(PortRangeEntry, sharing_flags),
            offset_of!(PortRangeEntry, delivery_mode),
            offset_of!(PortRangeEntry, starting_port),
            offset_of!(PortRangeEntry, ending_port),
        ];
        assert_eq!(offsets, [16, 32, 40, 48, 52, 56, 60, 62]);
        assert_eq!((size_of::<PortRangeEntry>(), size_of::<PortRange>()), (64, 4));
    }

    #[test]
    fn answers_become_entries() {
        let machine: Guid = "6b4d1f1c-6f0a-4c52-9d0e-3f2c8f3f9a01".parse().unwrap();
        let answer = json!([{"TargetPartitionId": machine, "Protocol": 3, "StartingPort": 49_152, "EndingPort": 49_162}]);
        let [entry] = *entries(&answer.to_string()).unwrap() else { panic!("not one entry") };
        assert_eq!(Guid::from(entry.target_partition_id), machine);
        assert_eq!((entry.protocol, entry.starting_port, entry.ending_port), (3, 49_152, 49_162));
        assert!(entries(r#"[{"Protocol": 3}]"#).is_err());
        let reserved: Reserved =
            serde_json::from_str(r#"{"Handle": 7, "StartingPort": 80, "EndingPort": 81}"#).unwrap();
        assert_eq!(
            (reserved.handle, reserved.range()),
            (7, PortRange { starting_port: 80, ending_port: 81 })
        );
    }
}
