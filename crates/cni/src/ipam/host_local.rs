//! Addresses of one node, remembered in files: the plugin host-local of the CNI project (`plugins/ipam/host-local`), with its
//! configuration and its files, so that a node can change from one to the other.
//!
//! `<dataDir>/<network>/<address>` contains the container and the interface that have the address. The file appears with
//! its content or not at all. `last_reserved_ip.0` is the address given last: the search for the next begins behind it, so
//! that an address rests as long as possible. The lock of the file `lock` serialises all of this.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use ipnet::{IpNet, Ipv4Net};
use serde::Deserialize;
use serde_json::{Value, json};

use super::result::{IpamResult, dns_of};
use crate::{Attachment, Code, Failure, Invocation, PrevResult};

/// The subnet that stands for the node's pod CIDR, as in Calico (`cni-plugin/internal/pkg/utils`). No subnet means the
/// same.
const POD_CIDR: &str = "usePodCidr";
/// The file with the address that was given last.
const LAST: &str = "last_reserved_ip.0";
/// A reservation before it has its name.
const UNFINISHED: &str = ".unfinished";

/// The section `ipam`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct Config {
    #[serde(rename = "type")]
    _type: String,
    /// The networks for one address of a pod each.
    ranges: Vec<Vec<RangeConfig>>,
    // The older way to write one range.
    subnet: Option<String>,
    range_start: Option<Ipv4Addr>,
    range_end: Option<Ipv4Addr>,
    gateway: Option<Ipv4Addr>,
    routes: Option<Value>,
    resolv_conf: Option<PathBuf>,
    data_dir: Option<PathBuf>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct RangeConfig {
    subnet: Option<String>,
    range_start: Option<Ipv4Addr>,
    range_end: Option<Ipv4Addr>,
    gateway: Option<Ipv4Addr>,
}

/// Addresses that may be given: from the first to the last, without the gateway.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Range {
    subnet: Ipv4Net,
    first: Ipv4Addr,
    last: Ipv4Addr,
    gateway: Ipv4Addr,
}

impl Range {
    fn has(&self, address: Ipv4Addr) -> bool {
        (self.first..=self.last).contains(&address) && address != self.gateway
    }

    fn of(config: &RangeConfig, subnet: Ipv4Net) -> Result<Self, Failure> {
        let subnet_text = subnet.to_string();
        let wrong = |what: &str| Err(invalid(format!("ipam: the range of {subnet_text} {what}")));
        if subnet != subnet.trunc() {
            return wrong("has bits after its prefix");
        }
        if subnet.prefix_len() > 30 {
            return wrong("has no addresses for pods");
        }
        let (network, broadcast) = (subnet.network().to_bits(), subnet.broadcast().to_bits());
        let first = config.range_start.unwrap_or(Ipv4Addr::from_bits(network + 1));
        let last = config.range_end.unwrap_or(Ipv4Addr::from_bits(broadcast - 1));
        let gateway = config.gateway.unwrap_or(Ipv4Addr::from_bits(network + 1));
        if !subnet.contains(&first) || !subnet.contains(&last) || first > last {
            return wrong(&format!("cannot be from {first} to {last}"));
        }
        Ok(Self { subnet, first, last, gateway })
    }
}

fn invalid(msg: String) -> Failure {
    Failure::new(Code::INVALID_CONFIG, msg, "")
}

impl Config {
    fn of(call: &Invocation) -> Result<Self, Failure> {
        let section = call.config.extra.get("ipam").unwrap_or(&Value::Null);
        Self::deserialize(section).map_err(|error| {
            let msg = format!("the section ipam of network {} is invalid for host-local", call.config.name);
            Failure::new(Code::INVALID_CONFIG, msg, error.to_string())
        })
    }

    /// The ranges for the pod's IPv4 address.
    fn ranges(&self, pod_cidrs: PodCidrs<'_>) -> Result<Vec<Range>, Failure> {
        let own = RangeConfig {
            subnet: self.subnet.clone(),
            range_start: self.range_start,
            range_end: self.range_end,
            gateway: self.gateway,
        };
        let is_old = own.subnet.is_some() || own.range_start.is_some() || own.range_end.is_some();
        let set: Vec<&RangeConfig> = match &self.ranges[..] {
            [] => vec![&own],
            [set] if !is_old && !set.is_empty() => set.iter().collect(),
            _ => {
                let msg = "ipam of host-local has several sets of ranges, or an empty one".to_owned();
                return Err(Failure::new(
                    Code::NOT_SUPPORTED,
                    msg,
                    "a pod has one IPv4 address: write one set",
                ));
            }
        };
        let mut ranges: Vec<Range> = Vec::new();
        for config in set {
            let subnets = match config.subnet.as_deref() {
                None | Some("" | POD_CIDR) => pod_cidrs()?,
                Some(text) => match text.parse::<IpNet>() {
                    Ok(IpNet::V4(subnet)) => vec![subnet],
                    Ok(IpNet::V6(_)) => {
                        let msg = format!("ipam.subnet of host-local is {text}");
                        return Err(Failure::new(
                            Code::NOT_SUPPORTED,
                            msg,
                            "pods have no IPv6 addresses yet",
                        ));
                    }
                    Err(_) => {
                        return Err(invalid(format!(
                            "ipam.subnet of host-local is {text:?}, which is no network"
                        )));
                    }
                },
            };
            for subnet in subnets {
                let range = Range::of(config, subnet)?;
                if ranges.iter().any(|other| other.first <= range.last && range.first <= other.last) {
                    return Err(invalid(format!("ipam of host-local has ranges that overlap, at {subnet}")));
                }
                ranges.push(range);
            }
        }
        Ok(ranges)
    }

    fn store(&self, network: &str) -> Result<Store, Failure> {
        let folder = self.data_dir.clone().unwrap_or_else(|| PathBuf::from("/var/lib/cni/networks"));
        if network.contains(['/', '\\']) || network == ".." || network == "." {
            return Err(invalid(format!(
                "the network's name {network:?} is no file name, as host-local needs"
            )));
        }
        Store::open(folder.join(network))
    }

    fn dns(&self) -> Result<Value, Failure> {
        let Some(path) = &self.resolv_conf else { return Ok(json!({})) };
        fs::read_to_string(path).map(|text| dns_of(&text)).map_err(|error| failed(path, &error))
    }
}

/// Asks for the networks of the node's pods.
type PodCidrs<'a> = &'a dyn Fn() -> Result<Vec<Ipv4Net>, Failure>;

fn failed(path: &Path, error: &io::Error) -> Failure {
    Failure::new(Code::IO, format!("host-local: {}", path.display()), error.to_string())
}

/// The reservations of one network, locked.
struct Store {
    folder: PathBuf,
    /// Released when the file is closed.
    _lock: File,
}

impl Store {
    fn open(folder: PathBuf) -> Result<Self, Failure> {
        let path = folder.join("lock");
        let lock = fs::create_dir_all(&folder)
            .and_then(|()| File::options().create(true).read(true).append(true).open(&path))
            .and_then(|file| file.lock().map(|()| file));
        match lock {
            Ok(lock) => Ok(Self { folder, _lock: lock }),
            Err(error) => Err(failed(&path, &error)),
        }
    }

    /// Every reservation with its content, which is empty if a crash has lost it.
    fn all(&self) -> Result<Vec<(Ipv4Addr, String)>, Failure> {
        let mut all = Vec::new();
        for entry in fs::read_dir(&self.folder).map_err(|error| failed(&self.folder, &error))? {
            let entry = entry.map_err(|error| failed(&self.folder, &error))?;
            let Some(address) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            let text = fs::read_to_string(entry.path()).map_err(|error| failed(&entry.path(), &error))?;
            all.push((address, text.trim().to_owned()));
        }
        Ok(all)
    }

    /// The addresses of an attachment. Old files have no interface.
    fn of(&self, container: &str, interface: &str) -> Result<Vec<Ipv4Addr>, Failure> {
        let all = self.all()?.into_iter();
        let is_its = |text: &str| text == content(container, interface) || text == container;
        Ok(all.filter(|(_, text)| is_its(text)).map(|(address, _)| address).collect())
    }

    /// Reserves an address. Returns whether it was free.
    fn reserve(&self, address: Ipv4Addr, content: &str) -> Result<bool, Failure> {
        let (path, unfinished) = (self.folder.join(address.to_string()), self.folder.join(UNFINISHED));
        // Most addresses of a nearly full range are taken: each write and flush would be in vain.
        if path.exists() {
            return Ok(false);
        }
        let write = |mut file: File| file.write_all(content.as_bytes()).and_then(|()| file.sync_all());
        let reserved =
            File::create(&unfinished).and_then(write).and_then(|()| fs::hard_link(&unfinished, &path));
        let _ = fs::remove_file(&unfinished);
        match reserved {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(failed(&path, &error)),
        }
    }

    fn release(&self, address: Ipv4Addr) -> Result<(), Failure> {
        let path = self.folder.join(address.to_string());
        match fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(failed(&path, &error)),
            _ => Ok(()),
        }
    }

    /// The address that was given last, if it is known. It only decides where the search begins.
    fn last(&self) -> Option<Ipv4Addr> {
        fs::read_to_string(self.folder.join(LAST)).ok()?.trim().parse().ok()
    }

    fn set_last(&self, address: Ipv4Addr) {
        let _ = fs::write(self.folder.join(LAST), address.to_string());
    }
}

fn content(container: &str, interface: &str) -> String {
    format!("{container}\r\n{interface}")
}

/// ADD. A repeated call gives the same address.
pub(super) fn add(call: &Invocation, pod_cidrs: PodCidrs<'_>) -> Result<IpamResult, Failure> {
    let config = Config::of(call)?;
    let ranges = config.ranges(pod_cidrs)?;
    // Reading the routes as a result rejects those that a pod cannot have, before an address is reserved.
    let routes = |address: Ipv4Net| {
        IpamResult::read(&json!({"ips": [{"address": address}], "routes": config.routes}), "host-local")
    };
    let dns = config.dns()?;
    let requested = requested(call)?;
    let store = config.store(&call.config.name)?;
    let address = match store.of(&call.container_id, &call.interface)?.first() {
        Some(known) => *known,
        None => reserve(&store, &ranges, requested, &content(&call.container_id, &call.interface))?,
    };
    let Some(range) = ranges.iter().find(|range| range.has(address)) else {
        return Err(invalid(format!(
            "the container has the address {address}, which is in no range of ipam"
        )));
    };
    if requested.is_some_and(|requested| requested != address) {
        return Err(invalid(format!("the container has the address {address}, and asks for another one")));
    }
    let net = Ipv4Net::new_assert(address, range.subnet.prefix_len());
    Ok(IpamResult { dns, ..routes(net)? })
}

fn reserve(
    store: &Store,
    ranges: &[Range],
    requested: Option<Ipv4Addr>,
    content: &str,
) -> Result<Ipv4Addr, Failure> {
    let none = |why: String| Err(Failure::new(Code::IPAM, "host-local has no address for the pod", why));
    if let Some(address) = requested {
        if !ranges.iter().any(|range| range.has(address)) {
            return none(format!("{address} is in no range of ipam, or is a gateway"));
        }
        return match store.reserve(address, content)? {
            true => Ok(address),
            false => none(format!("{address} belongs to another container")),
        };
    }
    for address in after(ranges, store.last()) {
        if store.reserve(address, content)? {
            store.set_last(address);
            return Ok(address);
        }
    }
    let nets: Vec<String> = ranges.iter().map(|range| format!("{} to {}", range.first, range.last)).collect();
    none(format!("all of {} are in use; delete pods, or enlarge the range", nets.join(", ")))
}

/// Every address of the ranges, those after this one first.
fn after(ranges: &[Range], last: Option<Ipv4Addr>) -> impl Iterator<Item = Ipv4Addr> {
    let at = last.and_then(|last| Some((ranges.iter().position(|range| range.has(last))?, last)));
    let bits = |range: &Range| range.first.to_bits()..=range.last.to_bits();
    let (mut parts, mut rest) = (Vec::new(), Vec::new());
    for (index, range) in ranges.iter().enumerate() {
        match at {
            Some((position, last)) if position == index => {
                parts.push((last.to_bits().saturating_add(1)..=range.last.to_bits(), range.gateway));
                rest.push((range.first.to_bits()..=last.to_bits(), range.gateway));
            }
            Some((position, _)) if index < position => rest.push((bits(range), range.gateway)),
            _ => parts.push((bits(range), range.gateway)),
        }
    }
    // The last part is the range of the last address, up to it.
    rest.sort_by_key(|(range, _)| at.is_some_and(|(_, last)| range.contains(&last.to_bits())));
    let all = parts.into_iter().chain(rest);
    all.flat_map(|(range, gateway)| range.map(Ipv4Addr::from_bits).filter(move |address| *address != gateway))
}

/// The first addresses that a call may get, without the files, for tests.
#[cfg(test)]
pub(crate) fn candidates(call: &Invocation) -> Result<Vec<Ipv4Addr>, Failure> {
    let ranges = Config::of(call)?.ranges(&|| Ok(Vec::new()))?;
    let last = requested(call)?;
    Ok(after(&ranges, last).take(3).collect())
}

/// The address that the runtime requests.
fn requested(call: &Invocation) -> Result<Option<Ipv4Addr>, Failure> {
    let extra = &call.config.extra;
    let lists = [
        extra.get("runtimeConfig").and_then(|config| config.get("ips")),
        extra.get("args").and_then(|args| args.pointer("/cni/ips")),
    ];
    let mut texts: Vec<&Value> = Vec::new();
    for list in lists.into_iter().flatten().filter(|list| !list.is_null()) {
        let list =
            list.as_array().ok_or_else(|| invalid(format!("the requested addresses {list} are no list")))?;
        texts.extend(list);
    }
    let of_args = call.args.get("IP").filter(|text| !text.is_empty()).map(|text| json!(text));
    texts.extend(&of_args);
    match texts[..] {
        [] => Ok(None),
        [text] => {
            let text = text.as_str().unwrap_or_default();
            let address = text.split('/').next().unwrap_or_default().parse();
            address
                .map(Some)
                .map_err(|_| invalid(format!("the requested address {text:?} is no IPv4 address")))
        }
        _ => Err(Failure::new(
            Code::NOT_SUPPORTED,
            format!("the runtime requests {} addresses", texts.len()),
            "a pod has one IPv4 address",
        )),
    }
}

/// DEL.
pub(super) fn del(call: &Invocation) -> Result<(), Failure> {
    let store = Config::of(call)?.store(&call.config.name)?;
    let addresses = store.of(&call.container_id, &call.interface)?;
    addresses.into_iter().try_for_each(|address| store.release(address))
}

/// CHECK: the container has its address, and it is the one of ADD.
pub(super) fn check(call: &Invocation) -> Result<(), Failure> {
    let store = Config::of(call)?.store(&call.config.name)?;
    let differs = |msg: String| Err(Failure::new(Code::DIFFERS, msg, ""));
    let Some(address) = store.of(&call.container_id, &call.interface)?.first().copied() else {
        return differs(format!("host-local has no address of container {}", call.container_id));
    };
    match PrevResult::read(&call.config.extra)? {
        Some(before) if !before.has_address(&address.to_string()) => {
            differs(format!("prevResult does not have the address {address} of host-local"))
        }
        _ => Ok(()),
    }
}

/// GC: releases what belongs to no attachment that the runtime knows.
pub(super) fn collect_garbage(call: &Invocation) -> Result<(), Failure> {
    let valid = call.config.valid_attachments.as_deref().unwrap_or_default();
    let store = Config::of(call)?.store(&call.config.name)?;
    let is_known = |text: &str| {
        let is =
            |one: &Attachment| text == content(&one.container_id, &one.ifname) || text == one.container_id;
        valid.iter().any(is)
    };
    let all = store.all()?.into_iter();
    all.filter(|(_, text)| !is_known(text)).try_for_each(|(address, _)| store.release(address))
}

/// STATUS: the ranges are valid, and an address is free.
pub(super) fn status(call: &Invocation, pod_cidrs: PodCidrs<'_>) -> Result<(), Failure> {
    let config = Config::of(call)?;
    let ranges = config.ranges(pod_cidrs)?;
    let used = config.store(&call.config.name)?.all()?;
    let is_free = |address: &Ipv4Addr| !used.iter().any(|(other, _)| other == address);
    if after(&ranges, None).any(|address| is_free(&address)) {
        return Ok(());
    }
    Err(Failure::new(
        Code::NOT_AVAILABLE,
        "host-local has no free address",
        "delete pods, or enlarge the range",
    ))
}

#[cfg(test)]
mod tests;
