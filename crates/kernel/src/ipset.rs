//! The kernel's IP sets (`linux/netfilter/ipset/ip_set.h`), as far as they are left behind by others.

use crate::netlink::attribute::{Attributes, put, put_text, put_u32_be};
use crate::netlink::{Family, Request, Socket};
use crate::{Error, Result};

/// `NFNL_SUBSYS_IPSET`
const SUBSYSTEM: u16 = 6;
/// `IPSET_CMD_DESTROY` and `IPSET_CMD_LIST`
const DESTROY: u16 = 3;
const LIST: u16 = 7;
/// `IPSET_ATTR_PROTOCOL`, `IPSET_ATTR_SETNAME` and `IPSET_ATTR_FLAGS`
const PROTOCOL: u16 = 1;
const NAME: u16 = 2;
const FLAGS: u16 = 6;
/// The version of the protocol that all kernels since 2.6.39 know.
const VERSION: u8 = 6;
/// `IPSET_FLAG_LIST_SETNAME`: the names without the members.
const NAMES_ONLY: u32 = 1 << 1;

fn request(command: u16, fill: impl FnOnce(&mut Vec<u8>)) -> Request {
    // `struct nfgenmsg`: family IPv4, version, resource.
    let mut payload = vec![2, 0, 0, 0];
    put(&mut payload, PROTOCOL, &[VERSION]);
    fill(&mut payload);
    Request { kind: (SUBSYSTEM << 8) | command, flags: 0, payload }
}

/// The names of the sets in the calling thread's network namespace, in order; none if the kernel has no IP sets.
///
/// # Errors
/// The kernel's refusal to list them.
pub fn names() -> Result<Vec<String>> {
    /// The number of IP sets' part of netlink is unknown.
    const ABSENT: [i32; 2] = [libc::EINVAL, libc::EOPNOTSUPP];
    let mut socket = Socket::open(Family::Netfilter)?;
    let listed = socket.dump(&request(LIST, |to| put_u32_be(to, FLAGS | NETWORK_ORDER, NAMES_ONLY)));
    let replies = match listed {
        Err(refusal) if refusal.source.raw_os_error().is_some_and(|errno| ABSENT.contains(&errno)) => {
            return Ok(Vec::new());
        }
        listed => listed.map_err(Error::refused("list them", "IP sets"))?,
    };
    let name = |payload: &[u8]| Attributes(payload.get(4..).unwrap_or_default()).text(NAME);
    let mut names: Vec<_> = replies.iter().filter_map(|reply| name(&reply.payload)).collect();
    names.sort();
    Ok(names)
}

/// `NLA_F_NET_BYTEORDER`
const NETWORK_ORDER: u16 = 1 << 14;

/// Deletes a set that no rule uses. That it does not exist is no error.
///
/// # Errors
/// `EBUSY` if a rule uses it.
pub fn destroy(name: &str) -> Result<()> {
    let mut socket = Socket::open(Family::Netfilter)?;
    match socket.request(&request(DESTROY, |to| put_text(to, NAME, name))) {
        Err(refusal) if refusal.source.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        done => done.map_err(Error::refused("delete it", format!("IP set {name}"))),
    }
}

/// Creates an empty set of IPv4 addresses (`hash:ip`), for tests.
///
/// # Errors
/// The kernel's refusal.
#[doc(hidden)]
pub fn create(name: &str) -> Result<()> {
    /// `IPSET_CMD_CREATE`, `IPSET_ATTR_TYPENAME`, `IPSET_ATTR_REVISION`, `IPSET_ATTR_FAMILY`, `IPSET_ATTR_DATA`
    const CREATE: u16 = 2;
    const TYPE: u16 = 3;
    const REVISION: u16 = 4;
    const FAMILY: u16 = 5;
    const DATA: u16 = 7;
    let request = request(CREATE, |to| {
        put_text(to, NAME, name);
        put_text(to, TYPE, "hash:ip");
        put(to, REVISION, &[1]);
        put(to, FAMILY, &[2]);
        crate::netlink::attribute::put_nest(to, DATA, |_| ());
    });
    let mut socket = Socket::open(Family::Netfilter)?;
    socket.request(&request).map_err(Error::refused("create it", format!("IP set {name}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::namespace::NetNs;

    #[test]
    fn sets_are_listed_and_deleted() {
        let work = || {
            assert_eq!(names().unwrap(), Vec::<String>::new());
            ["b", "a"].iter().for_each(|name| create(name).unwrap());
            assert_eq!(names().unwrap(), ["a", "b"]);
            destroy("a").unwrap();
            destroy("a").expect("that it is gone is no error");
            assert_eq!(names().unwrap(), ["b"]);
        };
        NetNs::create().unwrap().run(work).unwrap();
    }
}
