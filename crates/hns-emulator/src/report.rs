//! An emulated HNS that does what a selftest found, and packets for the selftest of an emulated HNS.

use std::net::Ipv4Addr;

use tortie_hcn::selftest::{FoundLimits, HnsReport, HostDefault, Limit, ProbePacket, Traffic};
use tortie_hcn::{Feature, Guid};

use crate::acl::{Packet, PacketDirection, Verdict};
use crate::config::{Config, Limits};
use crate::emulator::Emulator;

const TCP: u8 = 6;

impl Config {
    /// The HNS of a selftest's report. What it does not say is as in [`Config::as_hns`] of its version.
    #[must_use]
    pub fn of_report(report: &HnsReport, provider_address: Ipv4Addr) -> Config {
        // Exhaustive, so that an answer is not forgotten here.
        let HnsReport {
            format: _,
            version,
            build: _,
            packets_by: _,
            strict,
            keeps_ids: _,
            keeps_acl_ids: _,
            accepts_taken_addresses,
            returned_zeroes,
            accepts: _,
            acl_removal,
            update_replaces,
            accepts_nested_sets,
            deletes_used_networks,
            limits,
            switch_default,
            host_default,
            equal_priority,
            set_reading,
            several_sets,
            // No option makes sets unusable.
            sets: _,
            egress_sees,
            on_rewrite,
        } = report;
        let usual = Config::as_hns(version.unwrap_or(Config::NEWEST), provider_address);
        Config {
            switch_default: switch_default.unwrap_or(usual.switch_default),
            host_default: match host_default {
                None => usual.host_default,
                Some(HostDefault::NotInvolved) => None,
                Some(HostDefault::Involved(action)) => Some(*action),
            },
            equal_priority: equal_priority.unwrap_or(usual.equal_priority),
            set_reading: set_reading.unwrap_or(usual.set_reading),
            several_sets: several_sets.unwrap_or(usual.several_sets),
            egress_sees: egress_sees.unwrap_or(usual.egress_sees),
            on_rewrite: on_rewrite.unwrap_or(usual.on_rewrite),
            acl_removal: acl_removal.unwrap_or(usual.acl_removal),
            update_replaces: update_replaces.unwrap_or(usual.update_replaces),
            limits: found(limits),
            early_nested_sets: match accepts_nested_sets {
                Some(accepts) => *accepts && !usual.version.supports(Feature::NestedIpSet),
                None => usual.early_nested_sets,
            },
            strict: strict.unwrap_or(usual.strict),
            accepts_taken_addresses: accepts_taken_addresses.unwrap_or(usual.accepts_taken_addresses),
            deletes_used_networks: deletes_used_networks.unwrap_or(usual.deletes_used_networks),
            returns_zeroes: returned_zeroes
                .as_ref()
                .map_or(usual.returns_zeroes, |returned| returned.iter().any(|member| member == "Action")),
            ..usual
        }
    }
}

fn found(limits: &FoundLimits) -> Limits {
    let FoundLimits { field_entries, set_members, endpoint_acls, modify_policies, priorities } = limits;
    let number = |limit: &Option<Limit>| match limit {
        Some(Limit::AtMost(most)) => Some(*most),
        Some(Limit::NoneBelow(_)) | None => None,
    };
    let usual = Limits::default();
    Limits {
        field_entries: number(field_entries),
        set_members: number(set_members),
        endpoint_acls: number(endpoint_acls),
        modify_policies: number(modify_policies),
        priorities: priorities.map_or(usual.priorities, |(lowest, highest)| lowest..=highest),
    }
}

impl Traffic for Emulator {
    fn open(&self, endpoint: Guid, local: Ipv4Addr, packet: &ProbePacket) -> Option<bool> {
        let service = packet.service.map(|(address, port)| (address.into(), port));
        let verdict = Emulator::open(self, endpoint, &seen(local, packet), service);
        verdict.ok().map(|verdict| verdict == Verdict::Allow)
    }

    fn is_open(&self, endpoint: Guid, local: Ipv4Addr, packet: &ProbePacket) -> Option<bool> {
        Emulator::is_open(self, endpoint, &seen(local, packet)).ok()
    }

    fn sender(&self) -> Option<String> {
        Some("the emulated HNS".to_owned())
    }
}

fn seen(local: Ipv4Addr, packet: &ProbePacket) -> Packet {
    Packet {
        direction: if packet.inbound { PacketDirection::In } else { PacketDirection::Out },
        protocol: TCP,
        local: local.into(),
        remote: packet.peer.0.into(),
        local_port: packet.port,
        remote_port: packet.peer.1,
    }
}
