//! Checks that several kinds of documents share.

use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use serde::de::DeserializeOwned;
use tortie_hcn::schema::{Policy, PolicySettings, Strict, lenient, strict as strictly};
use tortie_hcn::{Failure, HResult};

/// The VNIs that Windows accepts.
const VNIS: std::ops::Range<u32> = 4096..1 << 24;

pub(crate) fn fail<T>(code: HResult, error: impl Into<String>) -> Result<T, Failure> {
    Err(Failure::new(code, error))
}

/// Parses a document.
pub(crate) fn document<T: DeserializeOwned + Strict>(text: &str, strict: bool) -> Result<T, Failure> {
    let read = if strict { strictly(text) } else { lenient(text) };
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
