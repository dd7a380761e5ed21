//! Addresses of one node, remembered in files: the plugin host-local of the CNI project (`plugins/ipam/host-local`), with its
//! configuration and its files, so that a node can change from one to the other.
//!
//! `<dataDir>/<network>/<address>` contains the container and the interface that have the address. The file appears with
//! its content or not at all. `last_reserved_ip.<n>` is the address that the set of ranges `n` gave last: the search for the next
//! begins behind it, so that an address rests as long as possible. The lock of the file `lock` serialises all of this.
//!
//! Unlike that plugin, it gives no address that another network in `<dataDir>` has: a node that moves from flannel may still run pods
//! that flannel has connected, with addresses of the same range.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::net::{IpAddr, Ipv6Addr};
use std::path::{Path, PathBuf};

use ipnet::IpNet;
use serde::Deserialize;
use serde_json::{Value, json};

use super::Family;
use super::result::{IpamResult, dns_of};
use crate::{Attachment, Code, Failure, Invocation, PrevResult};

/// The subnet that stands for the node's IPv4 pod CIDR, as in Calico (`cni-plugin/internal/pkg/utils`). No subnet means the
/// same.
const POD_CIDR: &str = "usePodCidr";
/// The subnet that stands for the node's IPv6 pod CIDR, as in Calico.
const POD_CIDR_V6: &str = "usePodCidrIPv6";
/// The file with the address that a set of ranges gave last has the set's number behind this.
const LAST: &str = "last_reserved_ip.";
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
    range_start: Option<IpAddr>,
    range_end: Option<IpAddr>,
    gateway: Option<IpAddr>,
    routes: Option<Value>,
    resolv_conf: Option<PathBuf>,
    data_dir: Option<PathBuf>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct RangeConfig {
    subnet: Option<String>,
    range_start: Option<IpAddr>,
    range_end: Option<IpAddr>,
    gateway: Option<IpAddr>,
}

impl RangeConfig {
    /// The networks of the range.
    fn subnets(&self, pod_cidrs: PodCidrs<'_>) -> Result<Vec<IpNet>, Failure> {
        let family = match self.subnet.as_deref() {
            None | Some("" | POD_CIDR) => Family::V4,
            Some(POD_CIDR_V6) => Family::V6,
            Some(text) => {
                let unreadable =
                    |_| invalid(format!("ipam.subnet of host-local is {text:?}, which is no network"));
                return text.parse().map(|net| vec![net]).map_err(unreadable);
            }
        };
        let mut nets = pod_cidrs()?;
        nets.retain(|net| Family::of(&net.addr()) == family);
        if nets.is_empty() {
            let msg =
                format!("spec.podCIDRs of the Node has no {family} network, which ipam of host-local needs");
            let remedy =
                "let the controller manager allocate one (--allocate-node-cidrs), or write ipam.subnet";
            return Err(Failure::new(Code::TRY_AGAIN_LATER, msg, remedy));
        }
        Ok(nets)
    }
}

/// Addresses that may be given: from the first to the last, without the gateway.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Range {
    subnet: IpNet,
    first: IpAddr,
    last: IpAddr,
    gateway: IpAddr,
}

impl Range {
    fn family(&self) -> Family {
        Family::of(&self.first)
    }

    fn has(&self, address: IpAddr) -> bool {
        (self.first..=self.last).contains(&address) && address != self.gateway
    }

    fn of(config: &RangeConfig, subnet: IpNet) -> Result<Self, Failure> {
        let wrong = |what: &str| Err(invalid(format!("ipam: the range of {subnet} {what}")));
        if subnet != subnet.trunc() {
            return wrong("has bits after its prefix");
        }
        if subnet.prefix_len() > subnet.max_prefix_len() - 2 {
            return wrong("has no addresses for pods");
        }
        let at = |bits: u128| address_of(Family::of(&subnet.addr()), bits);
        let (network, end) = (bits(subnet.network()), bits(subnet.broadcast()));
        let first = config.range_start.unwrap_or(at(network + 1));
        // IPv6 has no broadcast.
        let last = config.range_end.unwrap_or(at(if subnet.addr().is_ipv4() { end - 1 } else { end }));
        let gateway = config.gateway.unwrap_or(at(network + 1));
        if !subnet.contains(&first) || !subnet.contains(&last) || first > last {
            return wrong(&format!("cannot be from {first} to {last}"));
        }
        Ok(Self { subnet, first, last, gateway })
    }
}

fn bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => address.to_bits().into(),
        IpAddr::V6(address) => address.to_bits(),
    }
}

/// The address of a family with these bits, of which those that it has not are zero.
fn address_of(family: Family, bits: u128) -> IpAddr {
    match family {
        Family::V4 => IpAddr::V4((bits as u32).into()),
        Family::V6 => IpAddr::V6(Ipv6Addr::from_bits(bits)),
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

    /// The sets of ranges. A pod gets one address of each, and has one of each family.
    fn sets(&self, pod_cidrs: PodCidrs<'_>) -> Result<Vec<Vec<Range>>, Failure> {
        let own = RangeConfig {
            subnet: self.subnet.clone(),
            range_start: self.range_start,
            range_end: self.range_end,
            gateway: self.gateway,
        };
        let is_old = own.subnet.is_some() || own.range_start.is_some() || own.range_end.is_some();
        let own = (is_old || self.ranges.is_empty()).then(|| vec![own]);
        let mut sets: Vec<Vec<Range>> = Vec::new();
        for configs in own.iter().chain(&self.ranges) {
            let set = set(configs, pod_cidrs)?;
            if sets.iter().any(|other| other[0].family() == set[0].family()) {
                let msg = format!("ipam of host-local has several sets of {} ranges", set[0].family());
                let why = "a pod has one address of each family: write one set of each";
                return Err(Failure::new(Code::NOT_SUPPORTED, msg, why));
            }
            sets.push(set);
        }
        Ok(sets)
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

/// The ranges of a set: at least one, of one family, without overlaps.
fn set(configs: &[RangeConfig], pod_cidrs: PodCidrs<'_>) -> Result<Vec<Range>, Failure> {
    let mut ranges: Vec<Range> = Vec::new();
    for config in configs {
        for subnet in config.subnets(pod_cidrs)? {
            let range = Range::of(config, subnet)?;
            if ranges.iter().any(|other| other.family() != range.family()) {
                return Err(invalid(format!("a set of ranges of host-local has both families, at {subnet}")));
            }
            if ranges.iter().any(|other| other.first <= range.last && range.first <= other.last) {
                return Err(invalid(format!("ipam of host-local has ranges that overlap, at {subnet}")));
            }
            ranges.push(range);
        }
    }
    match ranges.is_empty() {
        true => Err(invalid("ipam of host-local has an empty set of ranges".to_owned())),
        false => Ok(ranges),
    }
}

/// Asks for the networks of the node's pods, of both families.
type PodCidrs<'a> = &'a dyn Fn() -> Result<Vec<IpNet>, Failure>;

fn failed(path: &Path, error: &io::Error) -> Failure {
    Failure::new(Code::IO, format!("host-local: {}", path.display()), error.to_string())
}

/// The reservations of one network, locked.
struct Store {
    folder: PathBuf,
    /// The folders of other networks.
    others: Vec<PathBuf>,
    /// Released when the file is closed.
    _lock: File,
}

impl Store {
    fn open(folder: PathBuf) -> Result<Self, Failure> {
        let path = folder.join("lock");
        let lock = fs::create_dir_all(&folder)
            .and_then(|()| File::options().create(true).read(true).append(true).open(&path))
            .and_then(|file| file.lock().map(|()| file));
        let lock = lock.map_err(|error| failed(&path, &error))?;
        let all = folder.parent().unwrap_or(&folder);
        let entries = fs::read_dir(all).and_then(|entries| entries.collect::<io::Result<Vec<_>>>());
        let entries = entries.map_err(|error| failed(all, &error))?;
        let others = entries.iter().map(fs::DirEntry::path).filter(|path| *path != folder && path.is_dir());
        let others = others.collect();
        Ok(Self { folder, others, _lock: lock })
    }

    /// The folder of another network that has the address.
    fn other(&self, address: IpAddr) -> Option<&Path> {
        let name = file_of(address);
        self.others.iter().find(|other| other.join(&name).exists()).map(PathBuf::as_path)
    }

    /// Every reservation with its content, which is empty if a crash has lost it.
    fn all(&self) -> Result<Vec<(IpAddr, String)>, Failure> {
        let mut all = Vec::new();
        for entry in fs::read_dir(&self.folder).map_err(|error| failed(&self.folder, &error))? {
            let entry = entry.map_err(|error| failed(&self.folder, &error))?;
            let Some(address) = entry.file_name().to_str().and_then(address_of_file) else { continue };
            let text = fs::read_to_string(entry.path()).map_err(|error| failed(&entry.path(), &error))?;
            all.push((address, text.trim().to_owned()));
        }
        Ok(all)
    }

    /// The addresses of an attachment. Old files have no interface.
    fn of(&self, container: &str, interface: &str) -> Result<Vec<IpAddr>, Failure> {
        let all = self.all()?.into_iter();
        let is_its = |text: &str| text == content(container, interface) || text == container;
        Ok(all.filter(|(_, text)| is_its(text)).map(|(address, _)| address).collect())
    }

    /// Reserves an address. Returns whether it was free.
    fn reserve(&self, address: IpAddr, content: &str) -> Result<bool, Failure> {
        let (path, unfinished) = (self.folder.join(file_of(address)), self.folder.join(UNFINISHED));
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

    fn release(&self, address: IpAddr) -> Result<(), Failure> {
        let path = self.folder.join(file_of(address));
        match fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(failed(&path, &error)),
            _ => Ok(()),
        }
    }

    /// The address that a set gave last, if it is known. It only decides where the search begins.
    fn last(&self, set: usize) -> Option<IpAddr> {
        fs::read_to_string(self.folder.join(format!("{LAST}{set}"))).ok()?.trim().parse().ok()
    }

    fn set_last(&self, set: usize, address: IpAddr) {
        let _ = fs::write(self.folder.join(format!("{LAST}{set}")), address.to_string());
    }
}

/// The name of an address's file. Windows allows no colons, and host-local writes this instead (`disk/backend.go`).
fn file_of(address: IpAddr) -> String {
    let name = address.to_string();
    if cfg!(windows) { name.replace(':', "_") } else { name }
}

fn address_of_file(name: &str) -> Option<IpAddr> {
    if cfg!(windows) { name.replace('_', ":").parse().ok() } else { name.parse().ok() }
}

fn content(container: &str, interface: &str) -> String {
    format!("{container}\r\n{interface}")
}

/// ADD. A repeated call gives the same addresses.
pub(super) fn add(call: &Invocation, pod_cidrs: PodCidrs<'_>) -> Result<IpamResult, Failure> {
    let config = Config::of(call)?;
    let sets = config.sets(pod_cidrs)?;
    // Reading the routes as a result rejects those that a pod cannot have, before an address is reserved.
    let result = |addresses: &[IpNet]| {
        let ips: Vec<Value> = addresses.iter().map(|address| json!({"address": address})).collect();
        IpamResult::read(&json!({"ips": ips, "routes": config.routes}), "host-local")
    };
    let checked = result(&sets.iter().map(|set| set[0].subnet).collect::<Vec<_>>());
    checked.map_err(|failure| match failure.code {
        Code::DECODING => Failure { code: Code::INVALID_CONFIG, ..failure },
        _ => failure,
    })?;
    let dns = config.dns()?;
    let requested = requested(call)?;
    let store = config.store(&call.config.name)?;
    let all = || sets.iter().flatten();
    if let Some(address) = requested.iter().find(|address| !all().any(|range| range.has(**address))) {
        return none(format!("{address} is in no range of ipam, or is a gateway"));
    }
    let known = store.of(&call.container_id, &call.interface)?;
    if let Some(address) = known.iter().find(|address| !all().any(|range| range.has(**address))) {
        return Err(invalid(format!(
            "the container has the address {address}, which is in no range of ipam"
        )));
    }
    let mut addresses = Vec::new();
    for (number, ranges) in sets.iter().enumerate() {
        let of_set = |list: &[IpAddr]| {
            list.iter().copied().find(|address| ranges.iter().any(|range| range.has(*address)))
        };
        let (known, requested) = (of_set(&known), of_set(&requested));
        let address = match known {
            Some(known) if requested.is_some_and(|requested| requested != known) => {
                return Err(invalid(format!(
                    "the container has the address {known}, and asks for another one"
                )));
            }
            Some(known) => known,
            None => {
                let content = content(&call.container_id, &call.interface);
                reserve(&store, (number, ranges), requested, &content)?
            }
        };
        let range = ranges.iter().find(|range| range.has(address));
        let net = range.and_then(|range| IpNet::new(address, range.subnet.prefix_len()).ok());
        addresses.push(net.unwrap_or(address.into()));
    }
    Ok(IpamResult { dns, ..result(&addresses)? })
}

fn none<T>(why: String) -> Result<T, Failure> {
    Err(Failure::new(Code::IPAM, "host-local has no address for the pod", why))
}

fn reserve(
    store: &Store,
    (number, ranges): (usize, &[Range]),
    requested: Option<IpAddr>,
    content: &str,
) -> Result<IpAddr, Failure> {
    if let Some(address) = requested {
        if let Some(other) = store.other(address) {
            return none(format!(
                "{address} belongs to a container of another network ({})",
                other.display()
            ));
        }
        return match store.reserve(address, content)? {
            true => Ok(address),
            false => none(format!("{address} belongs to another container")),
        };
    }
    let mut of_others = BTreeSet::new();
    for address in after(ranges, store.last(number)) {
        if let Some(other) = store.other(address) {
            of_others.insert(other);
            continue;
        }
        if store.reserve(address, content)? {
            store.set_last(number, address);
            return Ok(address);
        }
    }
    let nets: Vec<String> = ranges.iter().map(|range| format!("{} to {}", range.first, range.last)).collect();
    let of_others: Vec<String> = of_others.iter().map(|folder| folder.display().to_string()).collect();
    let more = match of_others.is_empty() {
        true => String::new(),
        false => format!(
            ". Other networks have some of them ({}); remove such a folder when no pod of that network is left",
            of_others.join(", ")
        ),
    };
    none(format!("all of {} are in use; delete pods, or enlarge the range{more}", nets.join(", ")))
}

/// Every address of the ranges, those after this one first.
fn after(ranges: &[Range], last: Option<IpAddr>) -> impl Iterator<Item = IpAddr> {
    let at = last.and_then(|last| Some((ranges.iter().position(|range| range.has(last))?, last)));
    let all = |range: &Range| bits(range.first)..=bits(range.last);
    let (mut parts, mut rest) = (Vec::new(), Vec::new());
    for (index, range) in ranges.iter().enumerate() {
        match at {
            Some((position, last)) if position == index => {
                parts.push((bits(last).saturating_add(1)..=bits(range.last), range));
                rest.push((bits(range.first)..=bits(last), range));
            }
            Some((position, _)) if index < position => rest.push((all(range), range)),
            _ => parts.push((all(range), range)),
        }
    }
    // The last part is the range of the last address, up to it.
    rest.sort_by_key(|(part, _)| at.is_some_and(|(_, last)| part.contains(&bits(last))));
    parts.into_iter().chain(rest).flat_map(|(part, range)| {
        part.map(|bits| address_of(range.family(), bits)).filter(|address| *address != range.gateway)
    })
}

/// The first addresses that a call may get, without the files, for tests and fuzzing.
pub(crate) fn candidates(call: &Invocation) -> Result<Vec<IpAddr>, Failure> {
    let sets = Config::of(call)?.sets(&|| Ok(Vec::new()))?;
    let last = requested(call)?.first().copied();
    Ok(sets.iter().flat_map(|ranges| after(ranges, last).take(3)).collect())
}

/// The addresses that the runtime requests, at most one of each family.
fn requested(call: &Invocation) -> Result<Vec<IpAddr>, Failure> {
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
    let mut requested: Vec<IpAddr> = Vec::new();
    for text in texts {
        let text = text.as_str().unwrap_or_default();
        let address = text.split('/').next().unwrap_or_default().parse();
        let address: IpAddr =
            address.map_err(|_| invalid(format!("the requested address {text:?} is no address")))?;
        if requested.iter().any(|other| Family::of(other) == Family::of(&address)) {
            let msg = format!("the runtime requests several {} addresses", Family::of(&address));
            return Err(Failure::new(Code::NOT_SUPPORTED, msg, "a pod has at most one of each family"));
        }
        requested.push(address);
    }
    Ok(requested)
}

/// DEL.
pub(super) fn del(call: &Invocation) -> Result<(), Failure> {
    let store = Config::of(call)?.store(&call.config.name)?;
    let addresses = store.of(&call.container_id, &call.interface)?;
    addresses.into_iter().try_for_each(|address| store.release(address))
}

/// CHECK: the container has its addresses, and they are those of ADD.
pub(super) fn check(call: &Invocation) -> Result<(), Failure> {
    let store = Config::of(call)?.store(&call.config.name)?;
    let differs = |msg: String| Err(Failure::new(Code::DIFFERS, msg, ""));
    let addresses = store.of(&call.container_id, &call.interface)?;
    if addresses.is_empty() {
        return differs(format!("host-local has no address of container {}", call.container_id));
    }
    let Some(before) = PrevResult::read(&call.config.extra)? else { return Ok(()) };
    if let Some(address) = addresses.iter().find(|address| !before.has_address(&address.to_string())) {
        return differs(format!("prevResult does not have the address {address} of host-local"));
    }
    match before.addresses_of(&call.interface).find(|address| !addresses.contains(address)) {
        Some(address) => {
            differs(format!("host-local has not given {address} to container {}", call.container_id))
        }
        None => Ok(()),
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

/// STATUS: the ranges are valid, and an address of each family is free.
pub(super) fn status(call: &Invocation, pod_cidrs: PodCidrs<'_>) -> Result<(), Failure> {
    let config = Config::of(call)?;
    let sets = config.sets(pod_cidrs)?;
    let store = config.store(&call.config.name)?;
    let used = store.all()?;
    let is_free =
        |address: &IpAddr| !used.iter().any(|(other, _)| other == address) && store.other(*address).is_none();
    if sets.iter().all(|ranges| after(ranges, None).any(|address| is_free(&address))) {
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
