//! IPAM's records as CustomResourceDefinitions (`libcalico-go/lib/backend/k8s/resources/ipam_*.go`). In Tortie they have
//! the shape that they have in etcd; in the API, that shape is in `spec`, with some differences.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;
use serde_json::{Map, Value, json};
use sha3::{Digest, Sha3_256};
use tortie_api::{Key, Kind};

use super::envelope::take_object;
use super::group::CalicoGroup;

/// Fields with one name in etcd and another one in the API.
const RENAMED: [(Kind, &str, &str); 3] = [
    (Kind::IpamBlock, "affinity_claim_time", "affinityClaimTime"),
    (Kind::IpamConfig, "strict_affinity", "strictAffinity"),
    (Kind::IpamConfig, "auto_allocate_blocks", "autoAllocateBlocks"),
];

/// Whether the kind is one of IPAM's records.
pub(crate) fn is_ipam(kind: Kind) -> bool {
    matches!(kind, Kind::IpamBlock | Kind::BlockAffinity | Kind::IpamHandle | Kind::IpamConfig)
}

/// The object as it is stored, without its name and version.
pub(crate) fn encode(
    group: CalicoGroup,
    key: &Key,
    mut spec: Map<String, Value>,
) -> Result<Map<String, Value>, String> {
    let renamed = RENAMED.iter().filter(|(kind, ..)| *kind == key.kind);
    for (_, etcd, api) in renamed {
        if let Some(value) = spec.remove(*etcd) {
            spec.insert((*api).to_owned(), value);
        }
    }
    let mut metadata = Map::new();
    match key.kind {
        Kind::IpamBlock => {
            // The schema allows no null, and requires this field, which nobody reads.
            spec.retain(|name, value| !(name == "affinity" && value.is_null()));
            spec.entry("strictAffinity").or_insert(json!(false));
        }
        Kind::BlockAffinity => {
            let (owner, cidr) =
                key.name.split_once('/').ok_or("the name of an affinity is NODE/CIDR".to_owned())?;
            let (node, is_virtual) = node_field(owner);
            let deleted = spec.get("deleted").and_then(Value::as_bool).unwrap_or_default();
            let deleted = match group {
                CalicoGroup::Crd => json!(deleted.to_string()),
                CalicoGroup::Native => json!(deleted),
            };
            spec.insert("deleted".to_owned(), deleted);
            spec.entry("state").or_insert(json!("confirmed"));
            spec.insert("node".to_owned(), json!(node));
            spec.insert("cidr".to_owned(), json!(cidr));
            if is_virtual {
                spec.insert("type".to_owned(), json!("virtual"));
            }
            metadata.insert("labels".to_owned(), labels_of_affinity(node, is_virtual, cidr));
        }
        Kind::IpamHandle => {
            spec.insert("handleID".to_owned(), json!(key.name));
        }
        _ => {}
    }
    Ok([("metadata".to_owned(), Value::Object(metadata)), ("spec".to_owned(), Value::Object(spec))]
        .into_iter()
        .collect())
}

/// The field `node` of an affinity, and whether its type is `virtual`.
pub(crate) fn node_field(owner: &str) -> (&str, bool) {
    owner.strip_prefix("virtual:").map_or((owner, false), |name| (name, true))
}

/// The key and the value of a stored object; `None` if its `spec` does not tell its key.
pub(crate) fn decode(group: CalicoGroup, kind: Kind, mut object: Map<String, Value>) -> Option<(Key, Value)> {
    let mut spec = take_object(&mut object, "spec", "spec").ok()?;
    let text = |spec: &Map<String, Value>, field: &str| {
        spec.get(field).and_then(Value::as_str).filter(|text| !text.is_empty()).map(ToOwned::to_owned)
    };
    let name = match kind {
        Kind::IpamBlock => text(&spec, "cidr")?,
        Kind::BlockAffinity => {
            let owner = match text(&spec, "type").as_deref() {
                None | Some("host") => "",
                Some("virtual") => "virtual:",
                Some(_) => return None,
            };
            let name = format!("{owner}{}/{}", text(&spec, "node")?, text(&spec, "cidr")?);
            let deleted = match group {
                CalicoGroup::Crd => text(&spec, "deleted").is_some_and(|deleted| deleted == "true"),
                CalicoGroup::Native => spec.get("deleted").and_then(Value::as_bool).unwrap_or_default(),
            };
            spec.insert("deleted".to_owned(), json!(deleted));
            spec.remove("node");
            spec.remove("cidr");
            if !owner.is_empty() {
                spec.remove("type");
            }
            name
        }
        Kind::IpamHandle => {
            let name = text(&spec, "handleID")?;
            spec.remove("handleID");
            name
        }
        _ => object.get("metadata")?.get("name")?.as_str()?.to_owned(),
    };
    let renamed = RENAMED.iter().filter(|(of, ..)| *of == kind);
    for (_, etcd, api) in renamed {
        if let Some(value) = spec.remove(*api) {
            spec.insert((*etcd).to_owned(), value);
        }
    }
    Some((Key::global(kind, name), Value::Object(spec)))
}

/// The network of a block's name (`10-0-0-64-26`, `fd00--40-122`). The name of a CIDR has dashes instead of all other
/// characters than digits (`libcalico-go/lib/names/cidr.go`).
pub(crate) fn cidr_of_name(name: &str) -> Option<String> {
    let (address, length) = name.rsplit_once('-')?;
    let address = match address.replace('-', ".").parse::<Ipv4Addr>() {
        Ok(address) => IpAddr::V4(address),
        Err(_) => IpAddr::V6(address.replace('-', ":").parse().ok()?),
    };
    Some(IpNet::new(address, length.parse().ok()?).ok()?.to_string())
}

/// Whether a record is being deleted. Calico marks it first and removes it then, because another client may have changed
/// it in between (`libcalico-go/lib/backend/k8s/resources/ipam_block.go`).
pub(crate) fn is_deleted(value: &Value) -> bool {
    value["deleted"] == true
}

/// Calico lists the affinities of a node by these labels (`libcalico-go/lib/backend/model/block_affinity.go`).
fn labels_of_affinity(node: &str, is_virtual: bool, cidr: &str) -> Value {
    json!({
        "projectcalico.org/affinity-type": if is_virtual { "virtual" } else { "host" },
        "projectcalico.org/hostname-hash": base32(&Sha3_256::digest(node)),
        "projectcalico.org/ip-version": if cidr.contains(':') { "6" } else { "4" },
    })
}

/// RFC 4648 without padding.
fn base32(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 32] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567";
    let mut text = String::new();
    let (mut bits, mut count) = (0_u32, 0);
    for byte in bytes {
        bits = bits << 8 | u32::from(*byte);
        count += 8;
        while count >= 5 {
            count -= 5;
            text.push(char::from(ALPHABET[(bits >> count & 31) as usize]));
        }
        bits &= (1 << count) - 1;
    }
    if count > 0 {
        text.push(char::from(ALPHABET[(bits << (5 - count) & 31) as usize]));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const CRD: CalicoGroup = CalicoGroup::Crd;

    #[test]
    fn a_network_is_found_by_the_name_of_its_block() {
        for cidr in
            ["10.0.0.64/26", "0.0.0.0/0", "255.255.255.255/32", "fd00::40/122", "::/0", "1:2:3:4:5:6:7:8/128"]
        {
            assert_eq!(cidr_of_name(&super::super::resources::of_cidr(cidr)).as_deref(), Some(cidr));
        }
        for name in
            ["", "x", "10-0-0-64", "10-0-0-26", "10-0-0-256-26", "10-0-0-64-33", "10-0-0-64-x", "g--1-64"]
        {
            assert_eq!(cidr_of_name(name), None, "{name}");
        }
    }

    /// In the other group, only an affinity looks different.
    fn check(key: &Key, value: &Value, stored: &Value) {
        check_in(CRD, key, value, stored);
        let mut stored = stored.clone();
        if key.kind == Kind::BlockAffinity {
            stored["spec"]["deleted"] = json!(false);
        }
        check_in(CalicoGroup::Native, key, value, &stored);
    }

    fn check_in(group: CalicoGroup, key: &Key, value: &Value, stored: &Value) {
        let Value::Object(fields) = value.clone() else { panic!("{value}") };
        let written = encode(group, key, fields).unwrap_or_default();
        assert_eq!(Value::Object(written.clone()), *stored);
        let mut named = written;
        named.insert("metadata".to_owned(), json!({"name": "default"}));
        let (read_key, read) = decode(group, key.kind, named).unwrap_or_else(|| panic!("{key} is not read"));
        assert_eq!(read_key, *key);
        assert_eq!(read, *value);
    }

    #[test]
    fn records_are_those_of_calico() {
        let labels = json!({
            "projectcalico.org/affinity-type": "host",
            "projectcalico.org/hostname-hash": "PY3TQE2E3XMTETLM2MJO3UITKPFB27YUJ4T4E5XGPEJON3SM4QAA",
            "projectcalico.org/ip-version": "4",
        });
        check(
            &Key::global(Kind::BlockAffinity, "node-a/10.0.0.0/26"),
            &json!({"state": "pending", "deleted": false, "new": 1}),
            &json!({"metadata": {"labels": &labels}, "spec":
                {"state": "pending", "deleted": "false", "node": "node-a", "cidr": "10.0.0.0/26", "new": 1}}),
        );
        let mut of_load_balancers = labels.clone();
        of_load_balancers["projectcalico.org/affinity-type"] = json!("virtual");
        of_load_balancers["projectcalico.org/hostname-hash"] =
            json!(base32(&Sha3_256::digest("load-balancer")));
        check(
            &Key::global(Kind::BlockAffinity, "virtual:load-balancer/10.0.0.0/26"),
            &json!({"state": "confirmed", "deleted": false}),
            &json!({"metadata": {"labels": of_load_balancers}, "spec": {"state": "confirmed", "deleted": "false",
                "type": "virtual", "node": "load-balancer", "cidr": "10.0.0.0/26"}}),
        );
        let number = 1_800_000_000_000_000_123_u64;
        check(
            &Key::global(Kind::IpamBlock, "10.0.0.0/31"),
            &json!({"cidr": "10.0.0.0/31", "affinity_claim_time": "2026-01-01T00:00:00Z", "strictAffinity": false,
                "allocations": [null, 0], "unallocated": [0], "attributes": [{"handle_id": "h", "releasedAt": "x"}],
                "sequenceNumber": number, "sequenceNumberForAllocation": {"1": number}, "deleted": false}),
            &json!({"metadata": {}, "spec": {"cidr": "10.0.0.0/31", "affinityClaimTime": "2026-01-01T00:00:00Z",
                "strictAffinity": false, "allocations": [null, 0], "unallocated": [0],
                "attributes": [{"handle_id": "h", "releasedAt": "x"}],
                "sequenceNumber": number, "sequenceNumberForAllocation": {"1": number}, "deleted": false}}),
        );
        check(
            &Key::global(Kind::IpamHandle, "Calico.ABC"),
            &json!({"block": {"10.0.0.0/26": 1}, "deleted": false}),
            &json!({"metadata": {}, "spec":
                {"handleID": "Calico.ABC", "block": {"10.0.0.0/26": 1}, "deleted": false}}),
        );
        check(
            &Key::global(Kind::IpamConfig, "default"),
            &json!({"strict_affinity": true, "auto_allocate_blocks": true, "maxBlocksPerHost": 3}),
            &json!({"metadata": {}, "spec":
                {"strictAffinity": true, "autoAllocateBlocks": true, "maxBlocksPerHost": 3}}),
        );
    }

    #[test]
    fn a_block_without_an_owner_has_no_affinity() {
        let fields = [("affinity".to_owned(), Value::Null)].into_iter().collect();
        let written = encode(CRD, &Key::global(Kind::IpamBlock, "10.0.0.0/26"), fields).unwrap_or_default();
        assert_eq!(written["spec"], json!({"strictAffinity": false}));
    }

    #[test]
    fn an_object_without_a_key_is_not_read() {
        let table = [
            (Kind::IpamBlock, json!({})),
            (Kind::IpamBlock, json!({"spec": []})),
            (Kind::BlockAffinity, json!({"spec": {"node": "n"}})),
            (Kind::BlockAffinity, json!({"spec": {"node": "n", "cidr": "10.0.0.0/26", "type": "other"}})),
            (Kind::IpamHandle, json!({"spec": {"handleID": ""}})),
        ];
        for (kind, object) in table {
            let Value::Object(fields) = object.clone() else { panic!("{object}") };
            assert_eq!(decode(CRD, kind, fields), None, "{object}");
        }
    }
}
