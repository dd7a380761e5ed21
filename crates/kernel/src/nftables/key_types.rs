//! The types of keys and values as `nft` knows them: the numbers of types, and the metadata in which it keeps what a number cannot say.
//!
//! The numbers of the metadata are those of libnftnl (`include/libnftnl/udata.h`) and of nftables (`enum expr_types` in
//! `include/expression.h`, and the descriptions in `include/proto.h`).

use std::net::{IpAddr, SocketAddr};

use super::key::Field;
use super::set::{DataKind, SetSpec};

/// The number of a type: six bits for each field, the first one in the highest bits.
pub(super) fn number(fields: &[Field]) -> u32 {
    fields.iter().fold(0, |number, field| (number << 6) | *field as u32)
}

/// The length in bytes. The fields of a concatenation occupy whole registers of four bytes.
pub(super) fn length(fields: &[Field]) -> usize {
    match fields {
        [field] => field.length(),
        fields => fields.iter().map(|field| field.length().next_multiple_of(4)).sum(),
    }
}

/// The fields of the values of a map; none for verdicts.
pub(super) fn of_data(kind: DataKind) -> &'static [Field] {
    match kind {
        DataKind::Verdict => &[],
        DataKind::Number => &[Field::Mark],
        DataKind::Ipv6 => &[Field::Ipv6],
        DataKind::Priority => &[Field::Priority],
        DataKind::Ipv4Port => &[Field::Ipv4, Field::Port],
        DataKind::Ipv6Port => &[Field::Ipv6, Field::Port],
    }
}

/// An address and a port as the value of an element.
pub(super) fn socket(socket: SocketAddr) -> Vec<u8> {
    let [high, low] = socket.port().to_be_bytes();
    let port = [high, low, 0, 0];
    match socket.ip() {
        IpAddr::V4(address) => [&address.octets()[..], &port].concat(),
        IpAddr::V6(address) => [&address.octets()[..], &port].concat(),
    }
}

/// The address and the port of the value of an element.
pub(super) fn read_socket(bytes: &[u8]) -> Option<SocketAddr> {
    let (address, port) = bytes.split_last_chunk::<4>()?;
    let address: IpAddr = match address.len() {
        4 => <[u8; 4]>::try_from(address).ok()?.into(),
        _ => <[u8; 16]>::try_from(address).ok()?.into(),
    };
    Some(SocketAddr::new(address, u16::from_be_bytes([port[0], port[1]])))
}

/// The metadata of a set. Without the byte order of its keys and values, `nft` shows interface names as empty, and numbers backwards.
pub(super) fn user_data(spec: &SetSpec) -> Vec<u8> {
    let host = matches!(spec.key.as_slice(), [Field::Interface | Field::Mark | Field::Priority]);
    let mut data = Vec::new();
    put_number(&mut data, KEY_BYTE_ORDER, if host { HOST_ORDER } else { NETWORK_ORDER });
    if matches!(spec.data, Some(DataKind::Number | DataKind::Priority)) {
        put_number(&mut data, DATA_BYTE_ORDER, HOST_ORDER);
    }
    // `nft` has no named type for random numbers, so the metadata names the expressions that make the key.
    if spec.key.contains(&Field::Random) {
        put_nest(&mut data, KEY_TYPEOF, |to| put_typeof(to, &spec.key));
        let values = spec.data.map(of_data).unwrap_or_default();
        if !values.is_empty() {
            put_nest(&mut data, DATA_TYPEOF, |to| put_typeof(to, values));
        }
    }
    data
}

/// `NFTNL_UDATA_SET_KEYBYTEORDER`, `NFTNL_UDATA_SET_DATABYTEORDER`, with `BYTEORDER_HOST_ENDIAN` and `BYTEORDER_BIG_ENDIAN` of nftables.
const KEY_BYTE_ORDER: u8 = 0;
const DATA_BYTE_ORDER: u8 = 1;
const HOST_ORDER: u32 = 1;
const NETWORK_ORDER: u32 = 2;
/// `NFTNL_UDATA_SET_KEY_TYPEOF`, `NFTNL_UDATA_SET_DATA_TYPEOF`
const KEY_TYPEOF: u8 = 3;
const DATA_TYPEOF: u8 = 4;
/// `NFTNL_UDATA_SET_TYPEOF_EXPR`, `NFTNL_UDATA_SET_TYPEOF_DATA`
const EXPRESSION: u8 = 0;
const EXPRESSION_DATA: u8 = 1;
/// `EXPR_PAYLOAD`, `EXPR_META`, `EXPR_CONCAT`, `EXPR_NUMGEN`
const PAYLOAD: u32 = 7;
const META: u32 = 9;
const CONCATENATION: u32 = 13;
const NUMGEN: u32 = 23;

/// Fields as the expressions that load them. In a concatenation, each is in an attribute with its index as the type.
fn put_typeof(to: &mut Vec<u8>, fields: &[Field]) {
    if let [field] = fields {
        return put_field(to, *field);
    }
    put_number(to, EXPRESSION, CONCATENATION);
    put_nest(to, EXPRESSION_DATA, |to| {
        for (index, field) in (0..).zip(fields) {
            put_nest(to, index, |to| put_field(to, *field));
        }
    });
}

/// The attributes of an expression are numbers with these types and values, in order.
fn put_field(to: &mut Vec<u8>, field: Field) {
    // `NFTNL_UDATA_SET_…_PAYLOAD_DESC` and `…_TYPE`: the header (`PROTO_DESC_IP`, `_IP6`, `_TH`) and its field (`IPHDR_DADDR`,
    // `IP6HDR_DADDR`, `THDR_DPORT`); `META_KEY`; `NUMGEN_TYPE`, `_MOD` and `_OFFSET`.
    let (expression, attributes): (u32, &[u32]) = match field {
        Field::Ipv4 => (PAYLOAD, &[12, 12]),
        Field::Ipv6 => (PAYLOAD, &[13, 9]),
        Field::Port => (PAYLOAD, &[11, 2]),
        Field::Protocol => (META, &[16]),
        Field::Mark => (META, &[3]),
        Field::Priority => (META, &[2]),
        Field::Interface => (META, &[6]),
        // The modulus does not matter for the type; 2 is the smallest that `nft` accepts.
        Field::Random => (NUMGEN, &[1, 2, 0]),
        // `PROTO_DESC_ICMPV6`, `ICMP6HDR_TYPE`
        Field::Icmpv6Type => (PAYLOAD, &[8, 1]),
    };
    put_number(to, EXPRESSION, expression);
    put_nest(to, EXPRESSION_DATA, |to| {
        for (kind, value) in (0..).zip(attributes) {
            put_number(to, kind, *value);
        }
    });
}

/// Appends an attribute: type, length, value. Numbers are in host byte order.
fn put_number(to: &mut Vec<u8>, kind: u8, number: u32) {
    to.extend([kind, 4]);
    to.extend(number.to_ne_bytes());
}

/// Appends an attribute of attributes, which have less than 256 bytes together.
fn put_nest(to: &mut Vec<u8>, kind: u8, fill: impl FnOnce(&mut Vec<u8>)) {
    let mut nested = Vec::new();
    fill(&mut nested);
    to.extend([kind, nested.len() as u8]);
    to.extend(nested);
}
