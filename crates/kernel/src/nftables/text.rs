//! Rules and elements as text for users, similar to the output of `nft list`.

use std::borrow::Cow;
use std::net::{Ipv4Addr, Ipv6Addr};

use super::expr::{state, status};
use super::{
    CmpOp, CtKey, Data, Expr, Field, Header, Key, MetaKey, Register, Reject, Rule, SetRef, Value, Verdict,
};

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
        Some(Data::Socket(socket)) => format!("{range} : {} . {}", socket.ip(), socket.port()),
        Some(Data::Verdict(verdict)) => format!("{range} : {}", verdict_text(verdict)),
    }
}

/// A value that was loaded into a register and not used yet.
struct Loaded {
    register: Register,
    name: Cow<'static, str>,
    field: Option<Field>,
    mask: Option<Vec<u8>>,
}

#[derive(Default)]
struct Text {
    words: Vec<String>,
    loaded: Vec<Loaded>,
    /// The register and the text of a value that a map has loaded and that was not used yet.
    mapped: Option<(Register, String)>,
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
            Expr::Ct { register, key } => {
                let (name, field) = connection(*key);
                return self.load(*register, name, field);
            }
            Expr::Random { register, modulus } => {
                return self.load(*register, format!("numgen random mod {modulus}"), Some(Field::Random));
            }
            Expr::NetworkOrder { .. } => return,
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
                let text = format!("{name} map {}", set_text(set, &fields));
                self.words.extend(self.mapped.replace((*destination, text)).map(|(_, text)| text));
                return self.load(*destination, "that", Some(Field::Mark));
            }
            Expr::Learn { value, map, seconds, .. } => {
                let value = self.loaded.iter().position(|loaded| loaded.register == *value);
                let value = value.map(|index| self.loaded.split_off(index));
                let value: Vec<_> = value.into_iter().flatten().map(|loaded| loaded.name).collect();
                let (key, _) = self.unload();
                format!("update @{map} {{ {key} timeout {seconds}s : {} }}", value.join(" . "))
            }
            Expr::SetMeta { key, register } => {
                let text = match self.take_mapped(*register) {
                    Some(value) => format!("{} set {value}", meta(*key).0),
                    None if self.loaded.is_empty() => format!("{} set 0", meta(*key).0),
                    None => format!("{} set", meta(*key).0),
                };
                self.loaded.clear();
                text
            }
            Expr::Verdict(verdict) => verdict_text(verdict),
            Expr::Counter => "counter".to_owned(),
            Expr::Reject(Reject::TcpReset) => "reject with tcp reset".to_owned(),
            Expr::Reject(Reject::Prohibited) => "reject with icmpx admin-prohibited".to_owned(),
            Expr::Reject(Reject::PortUnreachable) => "reject with icmpx port-unreachable".to_owned(),
            Expr::Log { group, prefix } => format!("log group {group} prefix {prefix:?}"),
            Expr::Masquerade => "masquerade".to_owned(),
            Expr::MasqueradeToRandomPort => "masquerade fully-random".to_owned(),
            Expr::DestinationNat { address, .. } | Expr::DestinationNatToAddress { address, .. } => {
                self.loaded.clear();
                match self.take_mapped(*address) {
                    Some(value) => format!("dnat to {value}"),
                    None => "dnat to that".to_owned(),
                }
            }
            Expr::Notrack => "notrack".to_owned(),
            Expr::Other(name, _) => format!("({name})"),
        };
        // A value of a map that something else uses.
        self.words.extend(self.mapped.take().map(|(_, text)| text));
        self.words.push(word);
    }

    /// The text of the value that a map has loaded into this register, if it is the last one.
    fn take_mapped(&mut self, register: Register) -> Option<String> {
        self.mapped.take_if(|(of, _)| *of == register).map(|(_, text)| text)
    }

    fn load(&mut self, register: Register, name: impl Into<Cow<'static, str>>, field: Option<Field>) {
        self.loaded.retain(|loaded| loaded.register < register);
        self.loaded.push(Loaded { register, name: name.into(), field, mask: None });
    }

    /// The loaded values: the fields of a concatenation in order.
    fn unload(&mut self) -> (String, Vec<Field>) {
        let loaded = std::mem::take(&mut self.loaded);
        let names: Vec<_> = loaded.iter().map(|loaded| loaded.name.as_ref()).collect();
        let fields = loaded.iter().filter_map(|loaded| loaded.field).collect();
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
            Some(mask) if name == "ct status" && mask == status::DESTINATION_NAT.to_ne_bytes() => {
                format!("ct status {}dnat", if value == mask || op == "!= " { "" } else { "! " })
            }
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
        MetaKey::Priority => ("meta priority", Some(Field::Priority)),
        MetaKey::Mark => ("meta mark", Some(Field::Mark)),
        MetaKey::InputInterface => ("iifname", Some(Field::Interface)),
        MetaKey::OutputInterface => ("oifname", Some(Field::Interface)),
        MetaKey::NfProto => ("meta nfproto", None),
        MetaKey::L4Proto => ("meta l4proto", Some(Field::Protocol)),
    }
}

fn connection(key: CtKey) -> (&'static str, Option<Field>) {
    match key {
        CtKey::Status => ("ct status", None),
        CtKey::OriginalIpv4Destination => ("ct original ip daddr", Some(Field::Ipv4)),
        CtKey::OriginalIpv6Destination => ("ct original ip6 daddr", Some(Field::Ipv6)),
        CtKey::OriginalDestinationPort => ("ct original proto-dst", Some(Field::Port)),
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
        (Field::Mark | Field::Random, [a, b, c, d]) => u32::from_ne_bytes([*a, *b, *c, *d]).to_string(),
        (Field::Priority, [a, b, c, d]) => class(u32::from_ne_bytes([*a, *b, *c, *d])),
        (Field::Interface, name) => {
            format!("{:?}", String::from_utf8_lossy(name).trim_end_matches('\0'))
        }
        (_, value) => hex(value),
    }
}

/// A class in the form of `tc`.
fn class(number: u32) -> String {
    format!("{:x}:{:x}", number >> 16, number & 0xffff)
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
    use crate::nftables::{Element, NatFamily, Set, SetSpec};

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
    fn translations_of_services_read_as_nft_writes_them() {
        let l4 = Expr::Meta { register: 1, key: MetaKey::L4Proto };
        let key = [
            Expr::Payload { register: 0, header: Header::Network, offset: 16, length: 4 },
            l4.clone(),
            Expr::Payload { register: 2, header: Header::Transport, offset: 2, length: 2 },
        ];
        let original = [
            Expr::Ct { register: 0, key: CtKey::OriginalIpv4Destination },
            l4,
            Expr::Ct { register: 2, key: CtKey::OriginalDestinationPort },
        ];
        let priority = Expr::Meta { register: 0, key: MetaKey::Priority };
        let set_priority = Expr::SetMeta { register: 0, key: MetaKey::Priority };
        let map = |name: &str| Expr::Map { register: 0, set: SetRef::named(name), destination: 0 };
        let status = |op| {
            let mask = status::DESTINATION_NAT.to_ne_bytes().to_vec();
            vec![
                Expr::Ct { register: 0, key: CtKey::Status },
                Expr::Bitwise { source: 0, destination: 0, mask, xor: vec![0; 4] },
                Expr::Cmp { register: 0, op, value: vec![0; 4] },
            ]
        };
        let in_set = |name: &str| Expr::Lookup { register: 0, set: SetRef::named(name), invert: false };
        for (exprs, wanted) in [
            (
                [&key[..], &[map("class4"), set_priority.clone()]].concat(),
                "meta priority set ip daddr . meta l4proto . th dport map @class4",
            ),
            (vec![Expr::Immediate { register: 0, value: vec![0; 4] }, set_priority], "meta priority set 0"),
            (
                [
                    &key[..],
                    &[
                        Expr::Random { register: 3, modulus: 3 },
                        map("slots4"),
                        Expr::DestinationNat { family: NatFamily::Ipv4, address: 0, port: 1 },
                    ],
                ]
                .concat(),
                "dnat to ip daddr . meta l4proto . th dport . numgen random mod 3 map @slots4",
            ),
            (
                [status(CmpOp::NotEqual), original.to_vec(), vec![in_set("x"), Expr::MasqueradeToRandomPort]]
                    .concat(),
                "ct status dnat ct original ip daddr . meta l4proto . ct original proto-dst @x masquerade fully-random",
            ),
            (status(CmpOp::Equal), "ct status ! dnat"),
            (
                vec![
                    priority,
                    Expr::NetworkOrder { register: 0 },
                    Expr::Payload { register: 1, header: Header::Network, offset: 12, length: 4 },
                    in_set("allowed4"),
                ],
                "meta priority . ip saddr @allowed4",
            ),
        ] {
            assert_eq!(rule_text(&Rule::new(exprs, "")), wanted);
        }
        let fields = [Field::Ipv4, Field::Protocol, Field::Port, Field::Random];
        let key = Key::address_port([10, 0, 0, 1].into(), 6, 80).and(&1u32.to_ne_bytes()).unwrap();
        let element = Element::socket(key, ([10, 0, 0, 2], 8080).into());
        let wanted = "10.0.0.1 . tcp . 80 . 1 : 10.0.0.2 . 8080";
        assert_eq!(element_text(&fields, &element.key, &element.value), wanted);
        assert_eq!(element_text(&[Field::Priority], &Key::number(0x1_000a), &Value::default()), "1:a");
    }

    #[test]
    fn elements_of_rules_read_as_nft_writes_them() {
        let rule = Rule::new(
            vec![
                Expr::Payload { register: 0, header: Header::Network, offset: 8, length: 16 },
                Expr::Meta { register: 4, key: MetaKey::Priority },
                Expr::Learn { register: 0, value: 4, map: "clients".to_owned(), seconds: 60 },
                Expr::Verdict(Verdict::Accept),
            ],
            "",
        );
        let wanted = "update @clients { ip6 saddr timeout 60s : meta priority } accept";
        assert_eq!(rule_text(&rule), wanted);
    }

    #[test]
    fn elements_read_as_their_fields() {
        let key = Key::address_port([10, 0, 0, 1].into(), 17, 53);
        let fields = [Field::Ipv4, Field::Protocol, Field::Port];
        assert_eq!(element_text(&fields, &key, &Value::default()), "10.0.0.1 . udp . 53");
        assert_eq!(element_text(&[Field::Port], &key, &Value::default()), "0x0a0000011100000000350000");
    }
}
