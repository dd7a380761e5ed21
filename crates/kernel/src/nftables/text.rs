//! Rules and elements as text for users, similar to the output of `nft list`.

use std::net::{Ipv4Addr, Ipv6Addr};

use super::expr::state;
use super::{CmpOp, Data, Expr, Field, Header, Key, MetaKey, Register, Reject, Rule, SetRef, Value, Verdict};

/// The rule in one line, without its comment.
#[must_use]
pub fn rule_text(rule: &Rule) -> String {
    let mut text = Text::default();
    rule.exprs.iter().for_each(|expr| text.take(expr));
    text.words.join(" ")
}

/// An element of a set with such keys: `10.0.0.1 . tcp . 80`, `8000-8099`.
#[must_use]
pub fn element_text(fields: &[Field], key: &Key, value: &Value) -> String {
    let first = key_text(fields, key.bytes());
    let range = match value.end() {
        Some(end) if end != key => format!("{first}-{}", key_text(fields, end.bytes())),
        _ => first,
    };
    match value.data() {
        None => range,
        Some(Data::Number(number)) => format!("{range} : {number}"),
        Some(Data::Ipv6(address)) => format!("{range} : {address}"),
        Some(Data::Verdict(verdict)) => format!("{range} : {}", verdict_text(verdict)),
    }
}

/// A value that was loaded into a register and not used yet.
struct Loaded {
    register: Register,
    name: &'static str,
    field: Option<Field>,
    mask: Option<Vec<u8>>,
}

#[derive(Default)]
struct Text {
    words: Vec<String>,
    loaded: Vec<Loaded>,
}

impl Text {
    fn take(&mut self, expr: &Expr) {
        let word = match expr {
            Expr::Payload { register, header, offset, length } => {
                let (name, field) = payload(*header, *offset, *length);
                return self.load(*register, name, field);
            }
            Expr::Meta { register, key } => {
                let (name, field) = meta(*key);
                return self.load(*register, name, field);
            }
            Expr::CtState { register } => return self.load(*register, "ct state", None),
            Expr::Fib { register, .. } => return self.load(*register, "fib", None),
            // Padding of a key.
            Expr::Immediate { value, .. } if value.iter().all(|byte| *byte == 0) => return,
            Expr::Immediate { value, .. } => format!("immediate {}", hex(value)),
            Expr::Bitwise { mask, .. } => {
                if let Some(last) = self.loaded.last_mut() {
                    last.mask = Some(mask.clone());
                }
                return;
            }
            Expr::Cmp { op, value, .. } => self.compared(*op, value),
            Expr::Range { invert, first, last, .. } => {
                let (name, fields) = self.unload();
                let not = if *invert { "!= " } else { "" };
                format!("{name} {not}{}-{}", key_text(&fields, first), key_text(&fields, last))
            }
            Expr::Lookup { set, invert, .. } => {
                let (name, fields) = self.unload();
                format!("{name} {}{}", if *invert { "!= " } else { "" }, set_text(set, &fields))
            }
            Expr::VerdictMap { set, .. } => {
                let (name, fields) = self.unload();
                format!("{name} vmap {}", set_text(set, &fields))
            }
            Expr::Map { set, destination, .. } => {
                let (name, fields) = self.unload();
                self.words.push(format!("{name} map {}", set_text(set, &fields)));
                return self.load(*destination, "that", Some(Field::Mark));
            }
            Expr::SetMeta { key, .. } => {
                self.loaded.clear();
                format!("{} set", meta(*key).0)
            }
            Expr::Verdict(verdict) => verdict_text(verdict),
            Expr::Counter => "counter".to_owned(),
            Expr::Reject(Reject::TcpReset) => "reject with tcp reset".to_owned(),
            Expr::Reject(Reject::Prohibited) => "reject with icmpx admin-prohibited".to_owned(),
            Expr::Reject(Reject::PortUnreachable) => "reject with icmpx port-unreachable".to_owned(),
            Expr::Log { group, prefix } => format!("log group {group} prefix {prefix:?}"),
            Expr::Masquerade => "masquerade".to_owned(),
            Expr::DestinationNat { .. } => {
                self.loaded.clear();
                "dnat to that".to_owned()
            }
            Expr::Notrack => "notrack".to_owned(),
            Expr::Other(name, _) => format!("({name})"),
        };
        self.words.push(word);
    }

    fn load(&mut self, register: Register, name: &'static str, field: Option<Field>) {
        self.loaded.retain(|loaded| loaded.register < register);
        self.loaded.push(Loaded { register, name, field, mask: None });
    }

    /// The loaded values: the fields of a concatenation in order.
    fn unload(&mut self) -> (String, Vec<Field>) {
        let names: Vec<_> = self.loaded.iter().map(|loaded| loaded.name).collect();
        let fields = self.loaded.iter().filter_map(|loaded| loaded.field).collect();
        self.loaded.clear();
        (names.join(" . "), fields)
    }

    fn compared(&mut self, op: CmpOp, value: &[u8]) -> String {
        let mask = self.loaded.last_mut().and_then(|loaded| loaded.mask.take());
        let (name, fields) = self.unload();
        let op = match op {
            CmpOp::Equal => "",
            CmpOp::NotEqual => "!= ",
            CmpOp::Less => "< ",
            CmpOp::LessOrEqual => "<= ",
            CmpOp::Greater => "> ",
            CmpOp::GreaterOrEqual => ">= ",
        };
        match mask {
            Some(mask) if name == "ct state" => format!("ct state {}", states(&mask)),
            Some(mask) => format!("{name} & {} {op}{}", hex(&mask), hex(value)),
            None if name == "meta nfproto" => format!("{name} {op}{}", family(value)),
            None if fields.as_slice() == [Field::Interface] && value.len() < Field::Interface.length() => {
                format!("{name} {op}{:?}", format!("{}*", String::from_utf8_lossy(value)))
            }
            None => format!("{name} {op}{}", key_text(&fields, value)),
        }
    }
}

fn payload(header: Header, offset: u32, length: u32) -> (&'static str, Option<Field>) {
    match (header, offset, length) {
        (Header::Network, 12, 4) => ("ip saddr", Some(Field::Ipv4)),
        (Header::Network, 16, 4) => ("ip daddr", Some(Field::Ipv4)),
        (Header::Network, 8, 16) => ("ip6 saddr", Some(Field::Ipv6)),
        (Header::Network, 24, 16) => ("ip6 daddr", Some(Field::Ipv6)),
        (Header::Transport, 0, 2) => ("th sport", Some(Field::Port)),
        (Header::Transport, 2, 2) => ("th dport", Some(Field::Port)),
        (Header::Transport, 0, 1) => ("icmp type", Some(Field::Icmpv6Type)),
        (Header::Transport, 1, 1) => ("icmp code", Some(Field::Icmpv6Type)),
        (Header::Transport, 13, 1) => ("tcp flags", None),
        _ => ("payload", None),
    }
}

fn meta(key: MetaKey) -> (&'static str, Option<Field>) {
    match key {
        MetaKey::Mark => ("meta mark", Some(Field::Mark)),
        MetaKey::InputInterface => ("iifname", Some(Field::Interface)),
        MetaKey::OutputInterface => ("oifname", Some(Field::Interface)),
        MetaKey::NfProto => ("meta nfproto", None),
        MetaKey::L4Proto => ("meta l4proto", Some(Field::Protocol)),
    }
}

fn set_text(set: &SetRef, fields: &[Field]) -> String {
    match set {
        SetRef::Named(name) => format!("@{name}"),
        SetRef::Inline(set) => {
            let elements = set.elements.iter().map(|(key, value)| element_text(fields, key, value));
            format!("{{ {} }}", elements.collect::<Vec<_>>().join(", "))
        }
    }
}

fn verdict_text(verdict: &Verdict) -> String {
    match verdict {
        Verdict::Accept => "accept".to_owned(),
        Verdict::Drop => "drop".to_owned(),
        Verdict::Continue => "continue".to_owned(),
        Verdict::Return => "return".to_owned(),
        Verdict::Jump(chain) => format!("jump {chain}"),
        Verdict::Goto(chain) => format!("goto {chain}"),
    }
}

/// A key of these fields; bytes that do not fit them are shown in hexadecimal.
fn key_text(fields: &[Field], mut bytes: &[u8]) -> String {
    let all = bytes;
    let mut words = Vec::new();
    for field in fields {
        let Some(value) = bytes.get(..field.length()) else { return hex(all) };
        words.push(field_text(*field, value));
        bytes = bytes.get(field.length().next_multiple_of(4)..).unwrap_or_default();
    }
    if bytes.is_empty() && !words.is_empty() { words.join(" . ") } else { hex(all) }
}

fn field_text(field: Field, value: &[u8]) -> String {
    match (field, value) {
        (Field::Ipv4, [a, b, c, d]) => Ipv4Addr::new(*a, *b, *c, *d).to_string(),
        (Field::Ipv6, value) => {
            <[u8; 16]>::try_from(value).map_or_else(|_| hex(value), |bytes| Ipv6Addr::from(bytes).to_string())
        }
        (Field::Protocol, [number]) => match i32::from(*number) {
            libc::IPPROTO_TCP => "tcp".to_owned(),
            libc::IPPROTO_UDP => "udp".to_owned(),
            libc::IPPROTO_SCTP => "sctp".to_owned(),
            libc::IPPROTO_ICMP => "icmp".to_owned(),
            libc::IPPROTO_ICMPV6 => "ipv6-icmp".to_owned(),
            number => number.to_string(),
        },
        (Field::Icmpv6Type, [number]) => number.to_string(),
        (Field::Port, [high, low]) => u16::from_be_bytes([*high, *low]).to_string(),
        (Field::Mark, [a, b, c, d]) => u32::from_ne_bytes([*a, *b, *c, *d]).to_string(),
        (Field::Interface, name) => {
            format!("{:?}", String::from_utf8_lossy(name).trim_end_matches('\0'))
        }
        (_, value) => hex(value),
    }
}

fn family(value: &[u8]) -> String {
    match value.first().map(|number| i32::from(*number)) {
        Some(libc::NFPROTO_IPV4) => "ipv4".to_owned(),
        Some(libc::NFPROTO_IPV6) => "ipv6".to_owned(),
        _ => hex(value),
    }
}

fn states(mask: &[u8]) -> String {
    let bits = mask.try_into().map_or(0, u32::from_ne_bytes);
    let names = [
        (state::INVALID, "invalid"),
        (state::ESTABLISHED, "established"),
        (state::RELATED, "related"),
        (state::NEW, "new"),
        (state::UNTRACKED, "untracked"),
    ];
    let names: Vec<_> = names.into_iter().filter(|(bit, _)| bits & bit != 0).map(|(_, name)| name).collect();
    names.join(",")
}

fn hex(bytes: &[u8]) -> String {
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("0x{digits}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nftables::{Element, Set, SetSpec};

    fn ports(ports: &[(u16, u16)]) -> SetRef {
        let elements = ports.iter().map(|(first, last)| Element::range(Key::port(*first), Key::port(*last)));
        let elements = elements.map(|element| (element.key, element.value)).collect();
        SetRef::Inline(Box::new(Set { spec: SetSpec::interval(&[Field::Port]), elements }))
    }

    #[test]
    fn rules_read_as_nft_writes_them() {
        let l4 = Expr::Meta { register: 0, key: MetaKey::L4Proto };
        let tcp = Expr::Cmp { register: 0, op: CmpOp::Equal, value: vec![6] };
        let dport = Expr::Payload { register: 0, header: Header::Transport, offset: 2, length: 2 };
        let source = Expr::Payload { register: 0, header: Header::Network, offset: 12, length: 4 };
        let behind = |register, expr: &Expr| match expr.clone() {
            Expr::Meta { key, .. } => Expr::Meta { register, key },
            Expr::Payload { header, offset, length, .. } => {
                Expr::Payload { register, header, offset, length }
            }
            other => other,
        };
        let lookup = |set, invert| Expr::Lookup { register: 0, set, invert };
        let accept = Expr::Verdict(Verdict::Accept);
        let range = Expr::Range {
            register: 0,
            invert: true,
            first: 80u16.to_be_bytes().into(),
            last: 99u16.to_be_bytes().into(),
        };
        for (exprs, wanted) in [
            (
                vec![l4.clone(), tcp.clone(), dport.clone(), lookup(ports(&[(80, 80), (443, 444)]), false)],
                "meta l4proto tcp th dport { 80, 443-444 }",
            ),
            (vec![dport.clone(), range], "th dport != 80-99"),
            (
                vec![source, behind(1, &l4), behind(2, &dport), lookup(SetRef::named("p4x"), true)],
                "ip saddr . meta l4proto . th dport != @p4x",
            ),
            (
                vec![
                    Expr::Meta { register: 0, key: MetaKey::OutputInterface },
                    Expr::Cmp { register: 0, op: CmpOp::Equal, value: b"cali".into() },
                    Expr::Counter,
                    Expr::Verdict(Verdict::Goto("x".to_owned())),
                ],
                "oifname \"cali*\" counter goto x",
            ),
            (
                vec![
                    Expr::CtState { register: 0 },
                    Expr::Bitwise {
                        source: 0,
                        destination: 0,
                        mask: 6u32.to_ne_bytes().into(),
                        xor: vec![0; 4],
                    },
                    Expr::Cmp { register: 0, op: CmpOp::NotEqual, value: vec![0; 4] },
                    accept,
                ],
                "ct state established,related accept",
            ),
        ] {
            assert_eq!(rule_text(&Rule::new(exprs, "")), wanted);
        }
    }

    #[test]
    fn elements_read_as_their_fields() {
        let key = Key::address_port([10, 0, 0, 1].into(), 17, 53);
        let fields = [Field::Ipv4, Field::Protocol, Field::Port];
        assert_eq!(element_text(&fields, &key, &Value::default()), "10.0.0.1 . udp . 53");
        assert_eq!(element_text(&[Field::Port], &key, &Value::default()), "0x0a0000011100000000350000");
    }
}
