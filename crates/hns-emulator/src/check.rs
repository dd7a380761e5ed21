//! Checks that several kinds of documents share.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::{IpNet, Ipv4Net};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tortie_hcn::schema::{Policy, PolicySettings, Strict, lenient, strict as strictly};
use tortie_hcn::{Failure, Feature, HResult};

use crate::config::Config;

/// The VNIs that Windows accepts.
const VNIS: std::ops::Range<u32> = 4096..1 << 24;

pub(crate) fn fail<T>(code: HResult, error: impl Into<String>) -> Result<T, Failure> {
    Err(Failure::new(code, error))
}

/// Parses a document.
pub(crate) fn document<T: DeserializeOwned + Strict>(text: &str, strict: bool) -> Result<T, Failure> {
    let read = if strict { strictly(text) } else { lenient(&usual_form(text)) };
    read.map_err(|error| Failure::new(HResult::HCN_E_INVALID_JSON, error.to_string()))
}

/// The settings of a policy, if it has that type.
pub(crate) fn settings<T: PolicySettings>(policy: &Policy) -> Result<Option<T>, Failure> {
    policy.settings().map_err(|error| Failure::new(HResult::HCN_E_INVALID_POLICY, error.to_string()))
}

/// Parses an address.
pub(crate) fn address(text: &str, what: &str) -> Result<Ipv4Addr, Failure> {
    text.parse().map_err(|_| {
        Failure::new(HResult::HCN_E_INVALID_IP, format!("{what} {text:?} is not an IPv4 address"))
    })
}

/// Parses an address of a family that this HNS has.
pub(crate) fn any_address(text: &str, what: &str, config: &Config) -> Result<IpAddr, Failure> {
    match text.parse() {
        Ok(IpAddr::V6(ip)) if config.version.supports(Feature::Ipv6DualStack) => Ok(ip.into()),
        Ok(IpAddr::V6(_)) => fail(HResult::HCN_E_INVALID_IP, no_ipv6(text, what, config)),
        _ => address(text, what).map(IpAddr::V4),
    }
}

/// Parses a CIDR of a family that this HNS has, whose host bits are zero.
pub(crate) fn any_prefix(text: &str, what: &str, config: &Config) -> Result<IpNet, Failure> {
    match text.parse::<IpNet>() {
        Ok(IpNet::V6(_)) if !config.version.supports(Feature::Ipv6DualStack) => {
            fail(HResult::HCN_E_INVALID_PREFIX, no_ipv6(text, what, config))
        }
        Ok(IpNet::V6(net)) if net.trunc() == net => Ok(net.into()),
        _ => prefix(text, what).map(IpNet::V4),
    }
}

fn no_ipv6(text: &str, what: &str, config: &Config) -> String {
    format!("{what} {text:?}: HNS {} has no IPv6 beside IPv4", config.version)
}

/// Parses a CIDR whose host bits are zero.
pub(crate) fn prefix(text: &str, what: &str) -> Result<Ipv4Net, Failure> {
    match text.parse::<Ipv4Net>() {
        Ok(net) if net.trunc() == net => Ok(net),
        _ => fail(HResult::HCN_E_INVALID_PREFIX, format!("{what} {text:?} is not an IPv4 prefix")),
    }
}

/// Checks a VNI.
pub(crate) fn vni(vni: u32) -> Result<(), Failure> {
    if VNIS.contains(&vni) {
        return Ok(());
    }
    fail(
        HResult::HCN_E_INVALID_POLICY,
        format!("IsolationId {vni}: {} to {} are possible", VNIS.start, VNIS.end - 1),
    )
}

/// Other forms of members that HNS accepts: `null` for nothing, and words for numbers.
fn usual_form(text: &str) -> String {
    let Ok(mut value) = serde_json::from_str(text) else { return text.to_owned() };
    make_usual(&mut value);
    value.to_string()
}

fn make_usual(value: &mut Value) {
    match value {
        Value::Object(members) => {
            members.retain(|_, member| !member.is_null());
            for (name, member) in members {
                let number = member.as_str().and_then(|word| match name.as_str() {
                    "Flags" => number_of(&FLAGS, word),
                    "Protocol" => number_of(&PROTOCOLS, word),
                    _ => None,
                });
                match number {
                    Some(number) => *member = number.into(),
                    None => make_usual(member),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(make_usual),
        _ => {}
    }
}

/// Flags of networks, by their names (hcsshim, `hcn/hcnnetwork.go`).
const FLAGS: [(&str, u64); 5] = [
    ("None", 0),
    ("EnableDnsProxy", 1),
    ("EnableDhcpServer", 2),
    ("EnableMirroring", 4),
    ("EnableNonPersistent", 8),
];
const PROTOCOLS: [(&str, u64); 3] = [("ICMP", 1), ("TCP", 6), ("UDP", 17)];

/// The number of a word, or of several with commas in between.
fn number_of(known: &[(&str, u64)], words: &str) -> Option<u64> {
    let number = |word: &str| {
        let mut found = known.iter().filter(|(name, _)| name.eq_ignore_ascii_case(word.trim()));
        found.next().map(|(_, number)| *number)
    };
    words.split(',').map(number).try_fold(0, |all, number| Some(all | number?))
}
