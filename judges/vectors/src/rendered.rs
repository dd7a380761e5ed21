//! Replays Calico's clusters on the enforcing systems: this machine's kernel, with packets, and emulated Windows
//! nodes, by the ACLs of their pods.
//!
//! The kernel has the case's nodes, each with its host endpoints. On the emulator, two nodes stand for all nodes, and
//! host endpoints and the nodes' own decisions do not apply.

use std::collections::BTreeSet;
use std::net::IpAddr;

use anyhow::{Context, Result};
use testkit::emulator::{self, Rendering, on_windows};
use testkit::exceptions::Exception;
use testkit::programs::Sides;
use tortie_api::Kind;
use tortie_api::net::Protocol;
use tortie_dataplane::Reason;
use tortie_hcn::Version;
use tortie_linux::dataplane::Config;
use tortie_policy::program::Flow;

use super::clusters::{Case, ExpectedFlow, Objects, with_endpoints};
use super::hns;
use setup::packages::require_root;

const NODES: [&str; 3] = ["n1", "n2", "n3"];
const WINDOWS_NODES: [&str; 2] = ["n1", "n2"];

/// The enforcing system, with its state between clusters.
pub(super) enum Rendered {
    Kernel(Box<testkit::hosts::HostCluster>),
    Emulator(Box<emulator::EmulatedCluster>),
}

/// The outcome of one flow.
pub(super) enum Outcome {
    /// The flow cannot be tested, for this reason.
    LeftOut(&'static str),
    /// The verdict of the system, the expected one, and the exception that explains why the flow may not pass.
    Judged { passes: bool, expected: bool, exception: Option<Exception> },
}

impl Rendered {
    pub(super) fn kernel() -> Result<Self> {
        require_root("verdicts of the kernel")?;
        Ok(Self::Kernel(Box::new(testkit::hosts::HostCluster::new(&NODES, &Config::default())?)))
    }

    pub(super) fn emulator(version: Version, rendering: Rendering) -> Result<Self> {
        let cluster = emulator::EmulatedCluster::new(&WINDOWS_NODES, &hns(version), rendering)?;
        Ok(Self::Emulator(Box::new(cluster)))
    }

    /// Changes the cluster from the last case to this one, and tests its flows.
    pub(super) fn judge(&mut self, case: &Case) -> Result<Vec<Outcome>> {
        let objects = with_endpoints(&case.objects)?;
        let mut answers = BTreeSet::new();
        let flows = case.flows.iter();
        let obstacles = flows.map(|expected| {
            self.obstacle(expected).or_else(|| (!begins(&expected.flow, &mut answers)).then_some(ANSWERS))
        });
        let obstacles: Vec<Option<&'static str>> = obstacles.collect();
        match self {
            Self::Kernel(cluster) => by_kernel(cluster, &objects, &case.flows, &obstacles),
            Self::Emulator(cluster) => by_emulator(cluster, &on_two_nodes(objects), &case.flows, &obstacles),
        }
    }

    /// Why a flow cannot be tested.
    fn obstacle(&self, expected: &ExpectedFlow) -> Option<&'static str> {
        let flow = &expected.flow;
        let v4 = flow.source.is_ipv4();
        let opens_connection = match flow.icmp {
            Some((icmp_type, _)) if flow.protocol == Protocol::ICMP => v4 && [8, 13].contains(&icmp_type),
            Some((icmp_type, _)) => !v4 && icmp_type == 128,
            None => true,
        };
        if !opens_connection {
            return Some("ICMP messages that open no connection");
        }
        if matches!(self, Self::Kernel(_)) {
            return None;
        }
        let own = [0, 1].map(|index| IpAddr::from(emulator::node_address(index)));
        if !v4 {
            Some("IPv6 does not apply: VXLAN on Windows has none")
        } else if expected.expected.egress.or(expected.expected.ingress).is_none() {
            Some("flows without a decision of a pod do not apply: Windows nodes enforce no host endpoints")
        } else if own.contains(&flow.source) || own.contains(&flow.destination) {
            Some("flows of addresses that the emulated nodes have")
        } else {
            None
        }
    }
}

const ANSWERS: &str = "answers to other flows of the same cluster, and flows to the sender itself";

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
    cluster: &mut testkit::hosts::HostCluster,
    objects: &Objects,
    expected: &[ExpectedFlow],
    obstacles: &[Option<&'static str>],
) -> Result<Vec<Outcome>> {
    for report in cluster.change(objects)? {
        let unexpected =
            report.conditions().find(|found| found.reason != Reason::HostEndpointWithoutInterface);
        anyhow::ensure!(unexpected.is_none(), "a node reports {report:?}");
    }
    let tested: Vec<usize> = (0..expected.len()).filter(|index| obstacles[*index].is_none()).collect();
    let flows: Vec<Flow> = tested.iter().map(|index| expected[*index].flow).collect();
    let passed = cluster.passed(&flows)?;
    let passed: BTreeSet<usize> = passed.into_iter().map(|index| tested[index]).collect();
    let outcome = |(index, obstacle): (usize, &Option<&'static str>)| match obstacle {
        Some(reason) => Outcome::LeftOut(reason),
        None => Outcome::Judged {
            passes: passed.contains(&index),
            expected: expected[index].expected.passes(),
            exception: None,
        },
    };
    Ok(obstacles.iter().enumerate().map(outcome).collect())
}

fn by_emulator(
    cluster: &mut emulator::EmulatedCluster,
    objects: &Objects,
    expected: &[ExpectedFlow],
    obstacles: &[Option<&'static str>],
) -> Result<Vec<Outcome>> {
    let reports = cluster.change(&on_windows(objects, &WINDOWS_NODES))?;
    let exception = |flow: &Flow, end| {
        let conditions = cluster.location(end).and_then(|end| reports[end.node].endpoints.get(&end.endpoint));
        let is_reported = |known: &Exception| {
            conditions.into_iter().flatten().any(|reported| known.is_reported_by(reported))
        };
        Exception::of(flow.protocol).filter(is_reported)
    };
    let outcome = |(expected, obstacle): (&ExpectedFlow, &Option<&'static str>)| {
        if let Some(reason) = obstacle {
            return Ok(Outcome::LeftOut(reason));
        }
        let (flow, sides) = (&expected.flow, expected.expected);
        let ends = cluster.judge(flow).with_context(|| format!("{flow:?}"))?;
        let known = exception(flow, flow.source).or_else(|| exception(flow, flow.destination));
        // A pod that Calico does not consult, because its own node sends, does not count.
        let ours = Sides {
            egress: ends.egress.filter(|_| sides.egress.is_some()),
            hosts: None,
            ingress: ends.ingress.filter(|_| sides.ingress.is_some()),
        };
        let expected = Sides { hosts: None, ..sides }.passes();
        Ok(Outcome::Judged { passes: ours.passes(), expected, exception: known })
    };
    expected.iter().zip(obstacles).map(outcome).collect()
}

/// The same cluster on two nodes, without objects that concern the nodes themselves.
fn on_two_nodes(objects: Objects) -> Objects {
    let kept = objects.into_iter().filter(|(key, _)| key.kind != Kind::Node);
    let moved = kept.map(|(key, mut value)| {
        if key.kind == Kind::WorkloadEndpoint {
            let node =
                value["spec"]["node"].as_str().filter(|node| WINDOWS_NODES.contains(node)).unwrap_or("n1");
            value["spec"]["node"] = node.to_owned().into();
        }
        (key, value)
    });
    moved.collect()
}
