//! Encodes and decodes expressions and verdicts (`linux/netfilter/nf_tables.h`).

use super::expr::{CmpOp, CtKey, Expr, Header, MetaKey, NatFamily, Register, SetRef};
use super::set::Set;
use super::table::Count;
use super::verdict::{Reject, Verdict};
use crate::netlink::attribute::{Attributes, put, put_nest, put_text, put_u32_be};

/// `NFTA_LIST_ELEM`, `NFTA_EXPR_NAME`, `NFTA_EXPR_DATA`.
pub(super) const LIST_ELEM: u16 = 1;
const EXPR_NAME: u16 = 1;
const EXPR_DATA: u16 = 2;

/// `NFTA_DATA_VALUE`, `NFTA_DATA_VERDICT`, `NFTA_VERDICT_CODE`, `NFTA_VERDICT_CHAIN`.
const DATA_VALUE: u16 = 1;
const DATA_VERDICT: u16 = 2;
const VERDICT_CODE: u16 = 1;
const VERDICT_CHAIN: u16 = 2;

/// The name for which the kernel chooses the name of an anonymous set.
pub(super) const ANONYMOUS: &str = "__set%d";
/// The prefix of the names that it chooses.
pub(super) const ANONYMOUS_PREFIX: &str = "__set";

/// Appends an expression as an element of a list. `inline` returns the id of an inline set in the transaction.
pub(super) fn put_expr(to: &mut Vec<u8>, expr: &Expr, inline: &mut dyn FnMut(&Set) -> u32) {
    put_nest(to, LIST_ELEM, |to| {
        put_text(to, EXPR_NAME, name(expr));
        put_nest(to, EXPR_DATA, |to| put_expr_data(to, expr, inline));
    });
}

/// Appends the content of a counter expression.
pub(super) fn put_counter(to: &mut Vec<u8>) {
    put_text(to, EXPR_NAME, name(&Expr::Counter));
    put_nest(to, EXPR_DATA, |_| ());
}

/// The count of a counter expression (`NFTA_COUNTER_BYTES`, `NFTA_COUNTER_PACKETS`).
pub(super) fn count(attributes: Attributes<'_>) -> Option<Count> {
    if attributes.text(EXPR_NAME).as_deref() != Some("counter") {
        return None;
    }
    let data = attributes.nest(EXPR_DATA);
    Some(Count { packets: data.u64_be(2)?, bytes: data.u64_be(1)? })
}

/// The kernel's name of the expression. Tests replace some names, so that they are as unknown as those of a missing
/// module.
fn name(expr: &Expr) -> &str {
    let name = known_name(expr);
    #[cfg(any(test, feature = "missing-modules"))]
    if unheard::is(name) {
        return "unheard-of";
    }
    name
}

fn known_name(expr: &Expr) -> &str {
    match expr {
        Expr::Payload { .. } => "payload",
        Expr::Meta { .. } | Expr::SetMeta { .. } => "meta",
        Expr::CtState { .. } | Expr::Ct { .. } => "ct",
        Expr::Random { .. } => "numgen",
        Expr::NetworkOrder { .. } => "byteorder",
        Expr::Cmp { .. } => "cmp",
        Expr::Range { .. } => "range",
        Expr::Bitwise { .. } => "bitwise",
        Expr::Lookup { .. } | Expr::Map { .. } | Expr::VerdictMap { .. } => "lookup",
        Expr::Learn { .. } => "dynset",
        Expr::Immediate { .. } | Expr::Verdict(_) => "immediate",
        Expr::Counter => "counter",
        Expr::Reject(_) => "reject",
        Expr::Log { .. } => "log",
        Expr::Masquerade | Expr::MasqueradeToRandomPort => "masq",
        Expr::DestinationNat { .. } | Expr::DestinationNatToAddress { .. } => "nat",
        Expr::Notrack => "notrack",
        Expr::Fib { .. } => "fib",
        Expr::Other(name, _) => name,
    }
}

/// The attribute numbers are those of the `NFTA_PAYLOAD_…`, `NFTA_META_…`, … enumerations.
fn put_expr_data(to: &mut Vec<u8>, expr: &Expr, inline: &mut dyn FnMut(&Set) -> u32) {
    match expr {
        Expr::Payload { register, header, offset, length } => {
            put_numbers(to, &[(1, number(*register)), (2, *header as u32), (3, *offset), (4, *length)]);
        }
        Expr::Meta { register, key } => put_numbers(to, &[(1, number(*register)), (2, *key as u32)]),
        Expr::SetMeta { register, key } => put_numbers(to, &[(2, *key as u32), (3, number(*register))]),
        Expr::CtState { register } => put_numbers(to, &[(1, number(*register)), (2, CT_STATE)]),
        Expr::Ct { register, key } => {
            put_numbers(to, &[(1, number(*register)), (2, *key as u32)]);
            if *key != CtKey::Status {
                put(to, 3, &[CT_ORIGINAL]);
            }
        }
        Expr::Random { register, modulus } => {
            put_numbers(to, &[(1, number(*register)), (2, *modulus), (3, NUMGEN_RANDOM)]);
        }
        Expr::NetworkOrder { register } => {
            let register = number(*register);
            put_numbers(to, &[(1, register), (2, register), (3, TO_NETWORK), (4, 4), (5, 4)]);
        }
        Expr::Cmp { register, op, value } => {
            put_numbers(to, &[(1, number(*register)), (2, *op as u32)]);
            put_value(to, 3, value);
        }
        Expr::Range { register, invert, first, last } => {
            put_numbers(to, &[(1, number(*register)), (2, u32::from(*invert))]);
            put_value(to, 3, first);
            put_value(to, 4, last);
        }
        Expr::Bitwise { source, destination, mask, xor } => {
            put_numbers(to, &[(1, number(*source)), (2, number(*destination)), (3, mask.len() as u32)]);
            put_value(to, 4, mask);
            put_value(to, 5, xor);
        }
        Expr::Lookup { register, set, invert } => {
            put_set_ref(to, set, inline);
            put_numbers(to, &[(2, number(*register))]);
            if *invert {
                put_numbers(to, &[(5, LOOKUP_INVERT)]);
            }
        }
        Expr::Map { register, set, destination } => {
            put_set_ref(to, set, inline);
            put_numbers(to, &[(2, number(*register)), (3, number(*destination))]);
        }
        Expr::VerdictMap { register, set } => {
            put_set_ref(to, set, inline);
            put_numbers(to, &[(2, number(*register)), (3, VERDICT_REGISTER)]);
        }
        Expr::Learn { register, value, map, seconds } => {
            put_text(to, 1, map);
            put_numbers(to, &[(3, DYNSET_UPDATE), (4, number(*register)), (5, number(*value))]);
            put(to, 6, &(u64::from(*seconds) * MILLISECONDS).to_be_bytes());
        }
        Expr::Immediate { register, value } => {
            put_numbers(to, &[(1, number(*register))]);
            put_value(to, 2, value);
        }
        Expr::Verdict(verdict) => {
            put_numbers(to, &[(1, VERDICT_REGISTER)]);
            put_verdict(to, 2, verdict);
        }
        Expr::Counter | Expr::Masquerade | Expr::Notrack => {}
        Expr::MasqueradeToRandomPort => put_numbers(to, &[(1, RANDOM_PORT)]),
        Expr::DestinationNat { family, address, port } => {
            put_numbers(to, &[(1, NAT_DESTINATION), (2, family.number())]);
            put_numbers(to, &[(3, number(*address)), (5, number(*port))]);
        }
        Expr::DestinationNatToAddress { family, address } => {
            put_numbers(to, &[(1, NAT_DESTINATION), (2, family.number()), (3, number(*address))]);
        }
        Expr::Reject(Reject::TcpReset) => put_numbers(to, &[(1, REJECT_TCP_RESET)]),
        Expr::Reject(Reject::Prohibited) => {
            put_numbers(to, &[(1, REJECT_ICMPX)]);
            put(to, 2, &[ICMPX_PROHIBITED]);
        }
        Expr::Reject(Reject::PortUnreachable) => {
            put_numbers(to, &[(1, REJECT_ICMPX)]);
            put(to, 2, &[ICMPX_PORT_UNREACHABLE]);
        }
        Expr::Log { group, prefix } => {
            put(to, 1, &group.to_be_bytes());
            put_text(to, 2, prefix);
        }
        Expr::Fib { register, result, flags } => {
            put_numbers(to, &[(1, number(*register)), (2, *result), (3, *flags)]);
        }
        Expr::Other(_, data) => to.extend(data),
    }
}

const VERDICT_REGISTER: u32 = 0;
const LOOKUP_INVERT: u32 = 1;
/// `NFT_DYNSET_OP_UPDATE`
const DYNSET_UPDATE: u32 = 1;
/// The milliseconds of a second.
const MILLISECONDS: u64 = 1_000;
/// `NFT_CT_STATE`
const CT_STATE: u32 = 0;
/// `IP_CT_DIR_ORIGINAL`
const CT_ORIGINAL: u8 = 0;
/// `NFT_NG_RANDOM`
const NUMGEN_RANDOM: u32 = 1;
/// `NFT_BYTEORDER_HTON`
const TO_NETWORK: u32 = 1;
/// `NF_NAT_RANGE_PROTO_RANDOM_FULLY`
const RANDOM_PORT: u32 = 0x10;
/// `NFT_NAT_DNAT`
const NAT_DESTINATION: u32 = 1;
const REJECT_TCP_RESET: u32 = 1;
const REJECT_ICMPX: u32 = 2;
const ICMPX_PORT_UNREACHABLE: u8 = 1;
const ICMPX_PROHIBITED: u8 = 3;

fn put_numbers(to: &mut Vec<u8>, numbers: &[(u16, u32)]) {
    for (kind, value) in numbers {
        put_u32_be(to, *kind, *value);
    }
}

fn put_set_ref(to: &mut Vec<u8>, set: &SetRef, inline: &mut dyn FnMut(&Set) -> u32) {
    match set {
        SetRef::Named(name) => put_text(to, 1, name),
        SetRef::Inline(set) => {
            put_text(to, 1, ANONYMOUS);
            put_u32_be(to, 4, inline(set));
        }
    }
}

/// Appends data that is a value.
pub(super) fn put_value(to: &mut Vec<u8>, kind: u16, value: &[u8]) {
    put_nest(to, kind, |to| put(to, DATA_VALUE, value));
}

/// Appends data that is a verdict.
pub(super) fn put_verdict(to: &mut Vec<u8>, kind: u16, verdict: &Verdict) {
    let (code, chain) = match verdict {
        Verdict::Drop => (0, None),
        Verdict::Accept => (1, None),
        Verdict::Continue => (libc::NFT_CONTINUE, None),
        Verdict::Jump(chain) => (libc::NFT_JUMP, Some(chain)),
        Verdict::Goto(chain) => (libc::NFT_GOTO, Some(chain)),
        Verdict::Return => (libc::NFT_RETURN, None),
    };
    put_nest(to, kind, |to| {
        put_nest(to, DATA_VERDICT, |to| {
            put_u32_be(to, VERDICT_CODE, code.cast_unsigned());
            if let Some(chain) = chain {
                put_text(to, VERDICT_CHAIN, chain);
            }
        });
    });
}

/// Decodes an expression. `inline` finds the anonymous set of a name. Expressions that this module does not write
/// become [`Expr::Other`].
pub(super) fn expr(attributes: Attributes<'_>, inline: &dyn Fn(&str) -> Option<Set>) -> Expr {
    let name = attributes.text(EXPR_NAME).unwrap_or_default();
    let data = attributes.nest(EXPR_DATA);
    known(&name, data, inline).unwrap_or_else(|| Expr::Other(name, data.0.to_vec()))
}

fn known(name: &str, data: Attributes<'_>, inline: &dyn Fn(&str) -> Option<Set>) -> Option<Expr> {
    let register_at = |kind| data.u32_be(kind).and_then(register);
    Some(match name {
        "payload" => Expr::Payload {
            register: register_at(1)?,
            header: [Header::Network, Header::Transport]
                .into_iter()
                .find(|h| Some(*h as u32) == data.u32_be(2))?,
            offset: data.u32_be(3)?,
            length: data.u32_be(4)?,
        },
        "meta" => {
            let key = META_KEYS.into_iter().find(|key| Some(*key as u32) == data.u32_be(2))?;
            match register_at(1) {
                Some(register) => Expr::Meta { register, key },
                None => Expr::SetMeta { register: register_at(3)?, key },
            }
        }
        "ct" => connection(data)?,
        "numgen" => {
            (data.u32_be(3)? == NUMGEN_RANDOM && data.u32_be(4).unwrap_or(0) == 0).then_some(())?;
            Expr::Random { register: register_at(1)?, modulus: data.u32_be(2)? }
        }
        "byteorder" => {
            let is_known = data.u32_be(1) == data.u32_be(2)
                && [3, 4, 5].map(|kind| data.u32_be(kind)) == [Some(TO_NETWORK), Some(4), Some(4)];
            is_known.then_some(Expr::NetworkOrder { register: register_at(1)? })?
        }
        "cmp" => Expr::Cmp {
            register: register_at(1)?,
            op: CMP_OPS.into_iter().find(|op| Some(*op as u32) == data.u32_be(2))?,
            value: value(data, 3)?.to_vec(),
        },
        "range" => Expr::Range {
            register: register_at(1)?,
            invert: data.u32_be(2)? == 1,
            first: value(data, 3)?.to_vec(),
            last: value(data, 4)?.to_vec(),
        },
        "bitwise" => {
            // 0 is the mask and xor operation; older kernels omit it.
            (data.u32_be(6).unwrap_or(0) == 0).then_some(())?;
            let (source, destination) = (register_at(1)?, register_at(2)?);
            Expr::Bitwise {
                source,
                destination,
                mask: value(data, 4)?.to_vec(),
                xor: value(data, 5)?.to_vec(),
            }
        }
        "lookup" => lookup(data, inline)?,
        "dynset" => {
            let milliseconds = data.u64_be(6)?;
            let is_known = data.u32_be(3)? == DYNSET_UPDATE
                && data.get(7).is_none()
                && milliseconds.is_multiple_of(MILLISECONDS);
            let seconds = u32::try_from(milliseconds / MILLISECONDS).ok().filter(|_| is_known)?;
            Expr::Learn { register: register_at(4)?, value: register_at(5)?, map: data.text(1)?, seconds }
        }
        "immediate" => match data.u32_be(1)? {
            VERDICT_REGISTER => Expr::Verdict(verdict(data.nest(2))?),
            _ => Expr::Immediate { register: register_at(1)?, value: value(data, 2)?.to_vec() },
        },
        "counter" => Expr::Counter,
        "reject" => match (data.u32_be(1)?, data.get(2)) {
            (REJECT_TCP_RESET, _) => Expr::Reject(Reject::TcpReset),
            (REJECT_ICMPX, Some([ICMPX_PROHIBITED])) => Expr::Reject(Reject::Prohibited),
            (REJECT_ICMPX, Some([ICMPX_PORT_UNREACHABLE])) => Expr::Reject(Reject::PortUnreachable),
            _ => return None,
        },
        "log" => {
            let group = u16::from_be_bytes(data.get(1)?.try_into().ok()?);
            Expr::Log { group, prefix: data.text(2).unwrap_or_default() }
        }
        "masq" if data.0.is_empty() => Expr::Masquerade,
        "masq" => {
            let is_known = data.u32_be(1) == Some(RANDOM_PORT) && data.get(2).is_none();
            is_known.then_some(Expr::MasqueradeToRandomPort)?
        }
        "nat" => nat(data)?,
        "notrack" => Expr::Notrack,
        "fib" => Expr::Fib { register: register_at(1)?, result: data.u32_be(2)?, flags: data.u32_be(3)? },
        _ => return None,
    })
}

const META_KEYS: [MetaKey; 6] = [
    MetaKey::Priority,
    MetaKey::Mark,
    MetaKey::InputInterface,
    MetaKey::OutputInterface,
    MetaKey::NfProto,
    MetaKey::L4Proto,
];

/// The parts of a connection, each with the direction that the kernel reports for it.
const CT_KEYS: [(CtKey, Option<u8>); 4] = [
    (CtKey::Status, None),
    (CtKey::OriginalIpv4Destination, Some(CT_ORIGINAL)),
    (CtKey::OriginalIpv6Destination, Some(CT_ORIGINAL)),
    (CtKey::OriginalDestinationPort, Some(CT_ORIGINAL)),
];

fn connection(data: Attributes<'_>) -> Option<Expr> {
    let register = register(data.u32_be(1)?)?;
    let (number, direction) = (data.u32_be(2)?, data.get(3).and_then(|bytes| bytes.first().copied()));
    if number == CT_STATE {
        return Some(Expr::CtState { register });
    }
    let (key, _) = CT_KEYS.into_iter().find(|(key, of)| (*key as u32, *of) == (number, direction))?;
    Some(Expr::Ct { register, key })
}

const CMP_OPS: [CmpOp; 6] =
    [CmpOp::Equal, CmpOp::NotEqual, CmpOp::Less, CmpOp::LessOrEqual, CmpOp::Greater, CmpOp::GreaterOrEqual];

fn lookup(data: Attributes<'_>, inline: &dyn Fn(&str) -> Option<Set>) -> Option<Expr> {
    let name = data.text(1)?;
    let set = match name.starts_with(ANONYMOUS_PREFIX) {
        true => SetRef::Inline(Box::new(inline(&name)?)),
        false => SetRef::Named(name),
    };
    let key = register(data.u32_be(2)?)?;
    match data.u32_be(3) {
        Some(VERDICT_REGISTER) => Some(Expr::VerdictMap { register: key, set }),
        Some(destination) => Some(Expr::Map { register: key, set, destination: register(destination)? }),
        None => Some(Expr::Lookup {
            register: key,
            set,
            invert: data.u32_be(5).unwrap_or(0) & LOOKUP_INVERT != 0,
        }),
    }
}

/// The kernel adds the ends of both ranges, which are their beginnings, and flags that say that they exist.
fn nat(data: Attributes<'_>) -> Option<Expr> {
    /// `NF_NAT_RANGE_MAP_IPS`
    const ADDRESS: u32 = 1;
    /// `NF_NAT_RANGE_PROTO_SPECIFIED`
    const PORT: u32 = 2;
    let family =
        [NatFamily::Ipv4, NatFamily::Ipv6].into_iter().find(|one| data.u32_be(2) == Some(one.number()))?;
    let port = data.u32_be(5);
    let expected = if port.is_some() { ADDRESS | PORT } else { ADDRESS };
    let is_known = data.u32_be(1)? == NAT_DESTINATION
        && data.u32_be(7).is_none_or(|flags| flags == expected)
        && [(3, 4), (5, 6)]
            .iter()
            .all(|(first, last)| data.u32_be(*last).is_none_or(|last| Some(last) == data.u32_be(*first)));
    let address = register(data.u32_be(3)?)?;
    is_known.then_some(match port {
        Some(port) => Expr::DestinationNat { family, address, port: register(port)? },
        None => Expr::DestinationNatToAddress { family, address },
    })
}

/// The bytes of data that is a value.
pub(super) fn value(data: Attributes<'_>, kind: u16) -> Option<&[u8]> {
    data.nest(kind).get(DATA_VALUE)
}

/// The verdict of data that is one.
pub(super) fn verdict(data: Attributes<'_>) -> Option<Verdict> {
    let verdict = data.nest(DATA_VERDICT);
    let chain = || verdict.text(VERDICT_CHAIN);
    Some(match verdict.u32_be(VERDICT_CODE)?.cast_signed() {
        0 => Verdict::Drop,
        1 => Verdict::Accept,
        libc::NFT_CONTINUE => Verdict::Continue,
        libc::NFT_RETURN => Verdict::Return,
        libc::NFT_JUMP => Verdict::Jump(chain()?),
        libc::NFT_GOTO => Verdict::Goto(chain()?),
        _ => return None,
    })
}

/// `NFT_REG32_00`, the first of the four-byte registers.
const REGISTER_32: u32 = 8;

fn number(register: Register) -> u32 {
    REGISTER_32 + u32::from(register)
}

/// Decodes a register. The kernel uses the old names, 1 to 4, for those at multiples of 16 bytes.
fn register(number: u32) -> Option<Register> {
    match number {
        1..=4 => Some((number as Register - 1) * 4),
        8..=23 => Some((number - REGISTER_32) as Register),
        _ => None,
    }
}

#[cfg(any(test, feature = "missing-modules"))]
pub mod unheard {
    //! For tests: expressions that the kernel does not know.

    use std::cell::Cell;

    thread_local! { static EXPRESSIONS: Cell<&'static [&'static str]> = const { Cell::new(&[]) }; }

    /// Makes this thread use unknown names for these expressions.
    pub fn set(names: &'static [&'static str]) {
        EXPRESSIONS.set(names);
    }

    /// Whether the kernel is given another name for it.
    #[must_use]
    pub fn is(name: &str) -> bool {
        EXPRESSIONS.get().contains(&name)
    }
}
