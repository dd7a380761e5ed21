//! Objects of datastores, whoever wrote them.

use std::net::IpAddr;

use serde_json::json;
use tortie_api::ipam::Block;
use tortie_api::net::IpVersion;
use tortie_api::{Kind, Resource, support};
use tortie_policy::{compile, compile_read, readable_order};

use crate::input::Input;

/// An object: a byte for its kind, and its JSON.
pub fn stored_object(bytes: &[u8]) {
    let mut input = Input(bytes);
    let Some(value) = Input(input.0.get(1..).unwrap_or_default()).json() else { return };
    let key = input.key(&value);
    let (read, wrong) = Resource::read_what_can_be(&key, &value);
    let whole = Resource::read(&key, &value);
    assert_eq!(whole.is_ok(), read.is_some() && wrong.is_empty(), "{key} {value}: {wrong:?}");
    if let Some(Resource::Node(node)) = &read {
        for version in [IpVersion::V4, IpVersion::V6] {
            let _ = (node.flannel_lease(version), node.pod_cidr(version), node.own_network(version));
            let _ = (node.vxlan_address(version), node.vxlan_mac(version), node.reported_address(version));
        }
        let _ = (node.addresses(), node.unusable_addresses().count(), node.ipip_address());
    }
    if let Some(resource) = &read {
        let _ = (support::reported(key.kind, &value), support::not_in_force(&key, &value), resource);
    }
}

/// A policy of any kind: a byte for the kind, and its JSON. It can be compiled in any case. If it is understood, the program is that of the
/// object that was read.
pub fn policy(bytes: &[u8]) {
    const KINDS: [Kind; 6] = [
        Kind::NetworkPolicy,
        Kind::GlobalNetworkPolicy,
        Kind::KubernetesNetworkPolicy,
        Kind::ClusterNetworkPolicy,
        Kind::AdminNetworkPolicy,
        Kind::BaselineAdminNetworkPolicy,
    ];
    let mut input = Input(bytes);
    let kind = KINDS[usize::from(input.byte()) % KINDS.len()];
    let Some(value) = input.json() else { return };
    let key = tortie_api::Key::namespaced(kind, if kind.namespaced() { "n" } else { "" }, "x");
    let compiled = compile(&key, &value).unwrap_or_else(|| panic!("{kind:?} is a policy"));
    let _ = readable_order(&value["spec"]);
    match Resource::read(&key, &value) {
        Ok(read) => assert_eq!(compile_read(&key, &read).as_ref(), Some(&compiled), "{value}"),
        Err(problems) => {
            assert!(!problems.is_empty() && compiled.not_understood.is_some(), "{value}");
            assert!(compiled.ingress || compiled.egress, "it must close something: {value}");
        }
    }
}

/// A block of addresses. What agents and controllers do with it leaves it consistent.
pub fn ipam_block(bytes: &[u8]) {
    let Ok(mut block) = serde_json::from_slice::<Block>(bytes) else { return };
    let first: IpAddr = block.cidr.network();
    let _ = (block.allocated().count(), block.is_empty(), block.is_of_windows(), block.owner());
    let _ = (block.sequence_of(first), block.attribute_of(first), block.addresses_of("h").count());
    if block.check().is_err() {
        return;
    }
    let handle = block.attributes.iter().find_map(|attribute| attribute.handle_id.clone());
    block.end_cooldowns(|_| true);
    block.renew(first, 7);
    block.bump();
    block.release(&handle.unwrap_or_default(), None);
    block.release_addresses(&[first], Some("2026-01-01T00:00:00Z"));
    block.check().unwrap_or_else(|error| panic!("{error}"));
    let written = json!(block);
    let again: Result<Block, _> = serde_json::from_value(written.clone());
    assert_eq!(again.ok().map(|again| json!(again)), Some(written));
}
