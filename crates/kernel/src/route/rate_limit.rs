//! The limit of what a link sends: a token bucket as its root queueing discipline (`tc-tbf(8)`,
//! `linux/pkt_sched.h`).

use super::types::RateLimit;
use crate::netlink::attribute::{Attributes, put, put_nest, put_text};
use crate::netlink::{Reply, Request};

const KIND: &str = "tbf";
const CREATE_OR_REPLACE: u16 = libc::NLM_F_CREATE as u16 | libc::NLM_F_REPLACE as u16;

/// `TC_H_ROOT`
const ROOT: u32 = 0xffff_ffff;
/// The number of the discipline, `1:` in `tc`'s writing.
const HANDLE: u32 = 1 << 16;

const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
const TCA_TBF_PARMS: u16 = 1;
const TCA_TBF_RATE64: u16 = 4;
const TCA_TBF_BURST: u16 = 6;
/// `TC_LINKLAYER_ETHERNET`: lengths count as they are, without a table.
const ETHERNET: u8 = 1;

/// The length of `struct tcmsg`.
const HEADER: usize = 20;

pub(super) fn set(link: u32, limit: &RateLimit) -> Request {
    let mut payload = header(link, HANDLE, ROOT);
    put_text(&mut payload, TCA_KIND, KIND);
    put_nest(&mut payload, TCA_OPTIONS, |to| {
        put(to, TCA_TBF_PARMS, &parameters(limit));
        put(to, TCA_TBF_RATE64, &limit.bytes_per_second.to_ne_bytes());
        put(to, TCA_TBF_BURST, &limit.burst.to_ne_bytes());
    });
    Request { kind: libc::RTM_NEWQDISC, flags: CREATE_OR_REPLACE, payload }
}

pub(super) fn list() -> Request {
    Request { kind: libc::RTM_GETQDISC, flags: 0, payload: header(0, 0, 0) }
}

/// The rate of a link's root discipline in bytes a second, if that is a token bucket.
pub(super) fn rate(reply: &Reply, link: u32) -> Option<u64> {
    let number = |at: usize| Some(u32::from_ne_bytes(*reply.payload.get(at..)?.first_chunk()?));
    if number(4)? != link || number(12)? != ROOT {
        return None;
    }
    let attributes = Attributes(reply.payload.get(HEADER..)?);
    if attributes.text(TCA_KIND)? != KIND {
        return None;
    }
    let options = attributes.nest(TCA_OPTIONS);
    let whole =
        options.get(TCA_TBF_RATE64).and_then(|bytes| Some(u64::from_ne_bytes(bytes.try_into().ok()?)));
    // The kernel lists the long form only if the short one is too small.
    let short = || Some(u32::from_ne_bytes(*options.get(TCA_TBF_PARMS)?.get(8..)?.first_chunk()?).into());
    whole.or_else(short)
}

/// `struct tcmsg`: family and padding, link, handle, parent, and a number that is not used here.
fn header(link: u32, handle: u32, parent: u32) -> Vec<u8> {
    [0, link, handle, parent, 0].into_iter().flat_map(u32::to_ne_bytes).collect()
}

/// `struct tc_tbf_qopt`: two `struct tc_ratespec`, of which the second stays empty, the length of the queue in bytes, and two
/// numbers that `TCA_TBF_BURST` replaces.
fn parameters(limit: &RateLimit) -> Vec<u8> {
    let rate = u32::try_from(limit.bytes_per_second).unwrap_or(u32::MAX);
    let mut parameters = vec![0, ETHERNET, 0, 0, 0, 0, 0, 0];
    parameters.extend(rate.to_ne_bytes());
    parameters.extend([0; 12]);
    parameters.extend(limit.queue().to_ne_bytes());
    parameters.extend([0; 8]);
    parameters
}
