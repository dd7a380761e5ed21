//! Replays Calico's clusters on the enforcing systems: this machine's kernel, with packets, and emulated Windows
//! nodes, by their ACLs.
//!
//! Two nodes stand for all nodes. Flows between pods, and between pods and outsiders, are tested. Clusters with host
//! endpoints are left to the programs and the oracle, and to random host endpoints on the kernel
//! (`crates/linux/tests/hosts.rs`).

use std::collections::BTreeSet;
use std::net::IpAddr;

use anyhow::{Context, Result};
use testkit::emulator::{self, Rendering, on_windows};
use testkit::exceptions::Exception;
use testkit::programs::Sides;
use tortie_api::net::Protocol;
use tortie_api::{Key, Kind};
use tortie_hcn::Version;
use tortie_linux::dataplane::Config;
use tortie_policy::program::Flow;

use super::clusters::{Case, ExpectedFlow, Objects, with_endpoints};
use super::hns;
use crate::setup::require_root;

const NODES: [&str; 2] = ["n1", "n2"];

/// The enforcing system, with its state between clusters.
pub(super) enum Rendered {
    Kernel(Box<testkit::kernel::KernelCluster>),
    Emulator(Box<emulator::EmulatedCluster>),
}

/// The outcome of one flow; `None` if it cannot be tested.
pub(super) enum Outcome {
    NotAsked,
    /// Whether it passes, and the exception that explains why it may not.
    Asked(Sides, Option<Exception>),
}

impl Rendered {
    pub(super) fn kernel() -> Result<Self> {
        require_root("verdicts of the kernel")?;
        Ok(Self::Kernel(Box::new(testkit::kernel::KernelCluster::new(NODES, &Config::default())?)))
    }

    pub(super) fn emulator(version: Version, rendering: Rendering) -> Result<Self> {
        Ok(Self::Emulator(Box::new(emulator::EmulatedCluster::new(&NODES, &hns(version), rendering)?)))
    }

    /// Changes the cluster from the last case to this one, and tests its flows.
    pub(super) fn judge(&mut self, case: &Case) -> Result<Vec<Outcome>> {
        let is_host = |(key, _): &(Key, _)| matches!(key.kind, Kind::HostEndpoint);
        if case.objects.iter().any(is_host) {
            return Ok(case.flows.iter().map(|_| Outcome::NotAsked).collect());
        }
        let objects = on_two_nodes(with_endpoints(&case.objects)?);
        let pods: BTreeSet<IpAddr> = addresses(&objects);
        let nodes = node_addresses(case);
        let mut answers = BTreeSet::new();
        let can_be_asked: Vec<bool> = case
            .flows
            .iter()
            .map(|expected| {
                self.can_ask(&expected.flow, &pods, &nodes) && begins(&expected.flow, &mut answers)
            })
            .collect();
        match self {
            Self::Kernel(cluster) => by_kernel(cluster, &objects, &case.flows, &can_be_asked),
            Self::Emulator(cluster) => by_emulator(cluster, &objects, &case.flows, &can_be_asked),
        }
    }

    fn can_ask(&self, flow: &Flow, pods: &BTreeSet<IpAddr>, nodes: &BTreeSet<IpAddr>) -> bool {
        let of_pods = pods.contains(&flow.source) || pods.contains(&flow.destination);
        let of_nodes = nodes.contains(&flow.source) || nodes.contains(&flow.destination);
        let v4 = flow.source.is_ipv4();
        let fits = match flow.icmp {
            // A reply without a request belongs to no flow.
            Some((icmp_type, _)) if flow.protocol == Protocol::ICMP => v4 && [8, 13].contains(&icmp_type),
            Some((icmp_type, _)) => !v4 && icmp_type == 128,
            None => [6, 17, 132, 47].contains(&flow.protocol.0),
        };
        let served = match self {
            Self::Kernel(_) => true,
            // Windows has no IPv6 on VXLAN, and the emulated nodes have addresses of their own.
            Self::Emulator(_) => {
                let own = [0, 1].map(|index| IpAddr::from(emulator::node_address(index)));
                v4 && !own.contains(&flow.source) && !own.contains(&flow.destination)
            }
        };
        of_pods && !of_nodes && fits && served
    }
}

/// Whether the flow is not the answer to another flow of the same case.
fn begins(flow: &Flow, answers: &mut BTreeSet<(Protocol, IpAddr, u16, IpAddr, u16)>) -> bool {
    let Flow { source, destination, protocol, source_port, destination_port, .. } = *flow;
    if source == destination
        || answers.contains(&(protocol, source, source_port, destination, destination_port))
    {
        return false;
    }
    answers.insert((protocol, destination, destination_port, source, source_port));
    true
}

fn by_kernel(
    cluster: &mut testkit::kernel::KernelCluster,
    objects: &Objects,
    expected: &[ExpectedFlow],
    can_be_asked: &[bool],
) -> Result<Vec<Outcome>> {
    for report in cluster.change(objects)? {
        anyhow::ensure!(report.conditions().next().is_none(), "a node reports {report:?}");
    }
    let asked: Vec<usize> = (0..expected.len()).filter(|index| can_be_asked[*index]).collect();
    let flows: Vec<Flow> = asked.iter().map(|index| expected[*index].flow).collect();
    let passed = cluster.passed(&flows)?;
    let outcome = |index: usize| match asked.iter().position(|asked| *asked == index) {
        // Only the combination of both ends is visible.
        Some(place) => {
            Outcome::Asked(Sides { hosts: Some(passed.contains(&place)), ..Sides::default() }, None)
        }
        None => Outcome::NotAsked,
    };
    Ok((0..expected.len()).map(outcome).collect())
}

fn by_emulator(
    cluster: &mut emulator::EmulatedCluster,
    objects: &Objects,
    expected: &[ExpectedFlow],
    can_be_asked: &[bool],
) -> Result<Vec<Outcome>> {
    let reports = cluster.change(&on_windows(objects, &NODES))?;
    let exception = |flow: &Flow, end| {
        let conditions = cluster.place(end).and_then(|end| reports[end.node].endpoints.get(&end.endpoint));
        let is_reported =
            |known: &Exception| conditions.into_iter().flatten().any(|told| known.is_told_by(told));
        Exception::of(flow.protocol).filter(is_reported)
    };
    let outcome = |(expected, asked): (&ExpectedFlow, &bool)| {
        if !asked {
            return Ok(Outcome::NotAsked);
        }
        let flow = &expected.flow;
        let ends = cluster.judge(flow).with_context(|| format!("{flow:?}"))?;
        let sides = Sides { egress: ends.egress, hosts: None, ingress: ends.ingress };
        let known = exception(flow, flow.source).or_else(|| exception(flow, flow.destination));
        Ok(Outcome::Asked(sides, known))
    };
    expected.iter().zip(can_be_asked).map(outcome).collect()
}

/// The same cluster on two nodes, without objects that concern the nodes themselves.
fn on_two_nodes(objects: Objects) -> Objects {
    let kept = objects.into_iter().filter(|(key, _)| key.kind != Kind::Node);
    let moved = kept.map(|(key, mut value)| {
        if key.kind == Kind::WorkloadEndpoint {
            let node = value["spec"]["node"].as_str().filter(|node| NODES.contains(node)).unwrap_or(NODES[0]);
            value["spec"]["node"] = node.to_owned().into();
        }
        (key, value)
    });
    moved.collect()
}

fn addresses(objects: &Objects) -> BTreeSet<IpAddr> {
    let endpoints = objects.iter().filter(|(key, _)| key.kind == Kind::WorkloadEndpoint);
    let nets = endpoints.filter_map(|(_, value)| value["spec"]["ipNetworks"].as_array()).flatten();
    nets.filter_map(|net| net.as_str()?.split('/').next()?.parse().ok()).collect()
}

fn node_addresses(case: &Case) -> BTreeSet<IpAddr> {
    let nodes = case.objects.iter().filter(|(key, _)| key.kind == Kind::Node);
    let annotations = nodes.filter_map(|(_, value)| value["metadata"]["annotations"].as_object()).flatten();
    annotations.filter_map(|(_, value)| value.as_str()?.split('/').next()?.parse().ok()).collect()
}
