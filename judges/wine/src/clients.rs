//! `cargo xtask wine clients`: Windows programs of others against the emulated HNS, by the libraries for Wine.

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use test_programs::HCSSHIM;
use tortie_hcn::schema::{Endpoint, IpConfig, Ipam, Network, NetworkMode, Query, Route, Subnet};
use tortie_hcn::{Guid, HcnExt, Kind, Version};
use tortie_hns_emulator::Config;
use tortie_servers::wine::HNS_ADDRESS;

use super::cluster::{ADDRESS, Hns};
use super::prefix::{Prefix, output};
use super::{bgp, flannel, kube_proxy, plugins};
use setup::windows::Libraries;
use setup::{go, step, windows};

/// The versions of HNS on which all programs and tests succeed.
pub(super) const VERSIONS: [Version; 2] = [Config::NEWEST, Config::SERVER_2022];
/// How many there are.
const TESTS: usize = 78;

/// The guest network service that the program of the other functions registers callbacks for.
const SERVICE: &str = "6b4d1f1c-6f0a-4c52-9d0e-3f2c8f3f9a01";

type Client = fn(&Libraries) -> Result<()>;
/// The programs, by name.
const CLIENTS: [(&str, Client); 6] = [
    ("plugins", plugins::run),
    ("kube-proxy", kube_proxy::run),
    ("tortie", kube_proxy::run_beside_tortie),
    ("flannel", flannel::run),
    ("hcsshim", hcsshim),
    ("bgp", bgp::run),
];

/// Runs all of them, or one.
pub(super) fn run(only: Option<&str>) -> Result<()> {
    let known = || CLIENTS.iter().any(|(name, _)| only.is_none_or(|only| only == *name));
    ensure!(known(), "the clients are {}", CLIENTS.map(|(name, _)| name).join(", "));
    let libraries = windows::libraries()?;
    let mut wanted = CLIENTS.iter().filter(|(name, _)| only.is_none_or(|only| only == *name));
    wanted.try_for_each(|(_, client)| client(&libraries))
}

/// What the gate has time for: hcsshim's tests on the newest version, and BGP.
pub(super) fn run_short() -> Result<()> {
    let libraries = windows::libraries()?;
    let (tests, version) = (tests()?, Config::NEWEST);
    step(&format!("hcsshim's tests on HNS {version}"), || in_one_process(&libraries, &tests, version))?;
    step("the functions that hcsshim does not use", || other_functions(&libraries))?;
    bgp::run(&libraries)
}

fn hcsshim(libraries: &Libraries) -> Result<()> {
    let tests = tests()?;
    for version in VERSIONS {
        step(&format!("hcsshim's tests on HNS {version}"), || in_one_process(libraries, &tests, version))?;
    }
    step("hcsshim's tests one by one", || one_by_one(libraries, &tests))?;
    step("the functions that hcsshim does not use", || other_functions(libraries))
}

/// Runs the program that calls them.
fn other_functions(libraries: &Libraries) -> Result<()> {
    go::build(&HCSSHIM)?;
    let program = HCSSHIM.binary("functions.exe")?;
    let (hns, machine) = machine(libraries, Config::NEWEST)?;
    let mut network = Network { name: "n".to_owned(), r#type: NetworkMode::L2Bridge, ..Network::default() };
    let gateway = Route {
        next_hop: "10.1.0.1".to_owned(),
        destination_prefix: "0.0.0.0/0".to_owned(),
        ..Route::default()
    };
    let subnet =
        Subnet { ip_address_prefix: "10.1.0.0/24".to_owned(), routes: vec![gateway], ..Subnet::default() };
    network.ipams = vec![Ipam { subnets: vec![subnet], ..Ipam::default() }];
    let address = IpConfig { ip_address: "10.1.0.9".to_owned(), ..IpConfig::default() };
    let endpoint = Endpoint {
        host_compute_network: hns.emulator.create_network(&network)?,
        ip_configurations: vec![address],
        ..Endpoint::default()
    };
    let endpoint = hns.emulator.create_endpoint(&endpoint)?;
    let printed = output(machine.command(&program).arg(endpoint.to_string()))?.stdout;
    let printed = String::from_utf8(printed).context("what the functions return")?;
    let lines: Vec<Value> = printed
        .lines()
        .map(serde_json::from_str)
        .collect::<Result<_, _>>()
        .context("what the functions return")?;
    let [stats, addresses, guests, guest, notifications, range, reserved, released] = &lines[..] else {
        bail!("{printed}")
    };
    ensure!(stats["EndpointId"] == json!(endpoint) && stats["PacketsSent"] == 0, "{stats}");
    ensure!(addresses[0]["IpAddress"] == "10.1.0.9", "{addresses}");
    ensure!(guests[0] == guest["ID"] && guest["State"] == 3 && guest["Name"] == "g", "{guests} {guest}");
    guest_network_services_are_right(notifications, range, reserved)?;
    ensure!(released.as_array().is_some_and(Vec::is_empty), "ports are still reserved: {released}");
    let left = hns.emulator.enumerate(Kind::GuestNetworkService, &Query::all())?;
    ensure!(left.is_empty() && hns.service.open_services() == 0, "{left:?}");
    ensure!(hns.service.open_reservations() == 0, "{} reservations", hns.service.open_reservations());
    ensure!(hns.service.open_handles().is_empty(), "{:?}", hns.service.open_handles());
    Ok(())
}

/// The program's two callbacks got one change each of their service, and the list had a port and a range.
fn guest_network_services_are_right(notifications: &Value, range: &Value, reserved: &Value) -> Result<()> {
    let of = |context: u32| json!({"Context": context, "Type": 0x11, "Data": {"ID": SERVICE, "Flags": 0}});
    ensure!(*notifications == json!([of(1), of(2)]), "{notifications}");
    let (starting, ending) = (49_152, 49_161);
    ensure!(*range == json!({"Starting": starting, "Ending": ending}), "{range}");
    let target: Guid = "6b4d1f1c-6f0a-4c52-9d0e-3f2c8f3f9a03".parse()?;
    // As C has it: the first three numbers begin with their lowest byte.
    let [a, b, c, d, e, f, g, h, rest @ ..] = *target.as_bytes();
    let (owner, target) = ([0; 16], [[d, c, b, a, f, e, h, g], rest].concat());
    let entry = |protocol: u32, starting: u16, ending: u16| {
        json!({"Owner": owner, "Target": target, "Protocol": protocol, "Priority": 0, "ReservationType": 0,
            "SharingFlags": 0, "DeliveryMode": 0, "Starting": starting, "Ending": ending})
    };
    ensure!(*reserved == json!([entry(1, 80, 80), entry(3, starting, ending)]), "{reserved}");
    Ok(())
}

/// Builds the tests. They are a program for Windows.
fn tests() -> Result<PathBuf> {
    go::build(&HCSSHIM)?;
    Ok(HCSSHIM.binary("hcn.test.exe")?)
}

/// A machine with an HNS that accepts what HNS accepts.
fn machine(libraries: &Libraries, version: Version) -> Result<(Hns, Prefix)> {
    let hns = Hns::start(Config::as_hns(version, ADDRESS))?;
    let machine = Prefix::new(libraries, (HNS_ADDRESS, &hns.address.to_string()))?;
    Ok((hns, machine))
}

fn in_one_process(libraries: &Libraries, tests: &std::path::Path, version: Version) -> Result<()> {
    let (hns, machine) = machine(libraries, version)?;
    let ran = machine.command(tests).arg("-test.v").output()?;
    let text = String::from_utf8_lossy(&ran.stdout);
    let of = |word: &str| -> BTreeSet<&str> {
        let lines = text.lines().filter_map(|line| line.strip_prefix("--- ")?.strip_prefix(word));
        lines.filter_map(|rest| rest.strip_prefix(": ")?.split_whitespace().next()).collect()
    };
    let (passed, failed, skipped) = (of("PASS"), of("FAIL"), of("SKIP"));
    println!("==> {} passed, failed: {failed:?}, skipped: {skipped:?}", passed.len());
    ensure!(passed.len() == TESTS && failed.is_empty(), "{} of {TESTS} tests pass: {text}", passed.len());
    has_expected_handles(&hns)
}

/// hcsshim leaves the network's handle open where HNS refuses an endpoint, which one test provokes.
fn has_expected_handles(hns: &Hns) -> Result<()> {
    let open = hns.service.open_handles();
    ensure!(matches!(open[..], [(Kind::Network, _)]), "open handles: {open:?}");
    Ok(())
}

fn one_by_one(libraries: &Libraries, tests: &std::path::Path) -> Result<()> {
    let (hns, machine) = machine(libraries, Config::NEWEST)?;
    let listed = output(machine.command(tests).args(["-test.list", "."]))?.stdout;
    let listed = String::from_utf8(listed).context("the list of tests")?;
    let mut failed = Vec::new();
    for name in listed.split_whitespace() {
        let one = format!("^{name}$");
        let ran = machine.command(tests).args(["-test.run", &one]).output()?;
        if !ran.status.success() {
            failed.push(format!("{name}: {}", String::from_utf8_lossy(&ran.stdout)));
        }
    }
    if !failed.is_empty() {
        bail!("{}", failed.join("\n"));
    }
    has_expected_handles(&hns)
}
