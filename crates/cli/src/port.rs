//! The `--port` option: protocol and port of a packet, with one meaning in every command.

use anyhow::{Context, bail};
use tortie_api::net::Protocol;
use tortie_reach::{CLIENT_PORT, Sample};

/// The forms of `--port`, for the help of a command.
pub(crate) const FORMS: &str =
    "80 (which is tcp/80), udp/53, sctp/9, icmp/8 or icmp/8/0 (type and code), icmpv6/128, proto/47";

/// A protocol with its port, or with its ICMP type and code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PortSpec {
    pub(crate) protocol: Protocol,
    /// 0 if the protocol has no ports.
    pub(crate) port: u16,
    pub(crate) icmp: Option<(u8, u8)>,
}

impl PortSpec {
    /// Parses the forms in [`FORMS`].
    pub(crate) fn read(text: &str) -> anyhow::Result<Self> {
        Self::read_parts(text).with_context(|| format!("--port {text:?}"))
    }

    fn read_parts(text: &str) -> anyhow::Result<Self> {
        if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
            return Self::ported(Protocol::TCP, text);
        }
        let parts: Vec<&str> = text.split('/').collect();
        match parts.as_slice() {
            ["proto", number] => Self::numbered(number),
            [name, rest @ ..] => {
                let Some(protocol) = Protocol::from_name(name) else {
                    bail!("{name:?} is no protocol; it is one of {FORMS}")
                };
                match (protocol, rest) {
                    (protocol, []) if protocol.has_ports() => bail!("a port is missing, as in {name}/80"),
                    (protocol, [port]) if protocol.has_ports() => Self::ported(protocol, port),
                    (protocol, rest) if is_icmp(protocol) => Self::icmp(protocol, rest),
                    (protocol, []) => Ok(Self { protocol, port: 0, icmp: None }),
                    _ => bail!("there is more than {name} has; it is one of {FORMS}"),
                }
            }
            [] => bail!("is empty"),
        }
    }

    fn ported(protocol: Protocol, port: &str) -> anyhow::Result<Self> {
        let plain = port.bytes().all(|byte| byte.is_ascii_digit());
        let number: u16 = port
            .parse()
            .ok()
            .filter(|number| plain && *number > 0)
            .with_context(|| format!("{port:?} is no port from 1 to 65535"))?;
        Ok(Self { protocol, port: number, icmp: None })
    }

    fn numbered(number: &str) -> anyhow::Result<Self> {
        let protocol = number.parse().ok().filter(|number| *number > 0).map(Protocol);
        let protocol = protocol.with_context(|| format!("{number:?} is no protocol from 1 to 255"))?;
        if protocol.has_ports() || is_icmp(protocol) {
            bail!("write it as {}/NUMBER", protocol.to_string().to_lowercase());
        }
        Ok(Self { protocol, port: 0, icmp: None })
    }

    fn icmp(protocol: Protocol, rest: &[&str]) -> anyhow::Result<Self> {
        let number = |text: &str| {
            text.parse::<u8>().with_context(|| format!("{text:?}: an ICMP type or code is at most 255"))
        };
        let icmp = match rest {
            // An echo request.
            [] if protocol == Protocol::ICMP => (8, 0),
            [] => (128, 0),
            [of] => (number(of)?, 0),
            [of, code] => (number(of)?, number(code)?),
            _ => bail!("there is more than a type and a code"),
        };
        Ok(Self { protocol, port: 0, icmp: Some(icmp) })
    }

    /// A packet of a typical client.
    pub(crate) fn sample(self) -> Sample {
        let Self { protocol, port, icmp } = self;
        let source_port = if protocol.has_ports() { CLIENT_PORT } else { 0 };
        Sample { protocol, source_port, destination_port: port, icmp }
    }
}

fn is_icmp(protocol: Protocol) -> bool {
    [Protocol::ICMP, Protocol::ICMPV6].contains(&protocol)
}

/// Parses a port for connection attempts in a lab, in the forms of `--port`.
///
/// # Errors
///
/// The text is no port, or one of another protocol than TCP.
pub fn tcp(text: &str) -> anyhow::Result<u16> {
    match PortSpec::read(text)? {
        PortSpec { protocol: Protocol::TCP, port, .. } => Ok(port),
        PortSpec { protocol, .. } => bail!("the lab tries TCP connections, and cannot try {protocol}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms() {
        let ported = |protocol, port| Some(PortSpec { protocol, port, icmp: None });
        let icmp = |protocol, icmp| Some(PortSpec { protocol, port: 0, icmp: Some(icmp) });
        for (text, expected) in [
            ("80", ported(Protocol::TCP, 80)),
            ("tcp/80", ported(Protocol::TCP, 80)),
            ("TCP/80", ported(Protocol::TCP, 80)),
            ("udp/53", ported(Protocol::UDP, 53)),
            ("sctp/9", ported(Protocol::SCTP, 9)),
            ("icmp", icmp(Protocol::ICMP, (8, 0))),
            ("icmp/3", icmp(Protocol::ICMP, (3, 0))),
            ("icmp/3/4", icmp(Protocol::ICMP, (3, 4))),
            ("icmpv6", icmp(Protocol::ICMPV6, (128, 0))),
            ("proto/47", ported(Protocol(47), 0)),
            ("", None),
            ("0", None),
            ("65536", None),
            ("tcp", None),
            ("tcp/", None),
            ("tcp/80/1", None),
            ("tcp/+80", None),
            ("icmp/256", None),
            ("icmp/8/0/0", None),
            ("proto/6", None),
            ("proto/1", None),
            ("proto/0", None),
            ("proto/256", None),
            ("proto", None),
            ("47/80", None),
            ("tcq/80", None),
        ] {
            assert_eq!(PortSpec::read(text).ok(), expected, "{text}");
        }
    }
}
