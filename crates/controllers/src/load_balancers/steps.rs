//! What to do next about a Service. Pure.
//!
//! Two processes may work on one Service at the same time. An address is taken from the status before it is released, and
//! both are decided after the sequence number of the allocation was read. Whoever shows an address that the status does not
//! have gives it a new sequence number first. So an address that is released is not shown afterwards. If both processes have
//! assigned one, the newest is kept, unless another one is shown.

use std::net::IpAddr;

use jiff::Timestamp;
use serde_json::Value;
use tortie_api::calico::{AssignIps, IpPool};
use tortie_ipam::Assignment;

use super::status::{self, shown};
use super::wanted::{Missing, Plan, Service, Wanted};

/// The next step.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Step {
    /// Everything is as it should be, or somebody else's business.
    Nothing,
    /// The status has to lose addresses, before they are released.
    Hide(Value),
    Release(Vec<Assignment>),
    Assign(Vec<Missing>),
    /// The status shows what the Service has. Addresses that it did not show need new sequence numbers first.
    Show {
        status: Value,
        new: Vec<Assignment>,
        problem: Option<String>,
    },
}

/// What decides about addresses besides the Service.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules<'a> {
    /// `None` if the setting is invalid: nothing changes then.
    pub(crate) assign_ips: Option<AssignIps>,
    /// The pools for load balancers.
    pub(crate) pools: &'a [(String, IpPool)],
    /// Whether the labels of its Namespace are known.
    pub(crate) knows_namespace: bool,
    pub(crate) now: Timestamp,
}

/// The next step for a Service with these addresses. `tried` is what became of an attempt to assign the missing ones.
pub(crate) fn next(
    value: &Value,
    service: &Service,
    has: &[Assignment],
    rules: Rules<'_>,
    tried: Option<Result<(), &str>>,
) -> Step {
    let Some(assign_ips) = rules.assign_ips else { return Step::Nothing };
    if service.is_ending() {
        return Step::Nothing;
    }
    let wanted = service.wanted(assign_ips, rules.pools);
    let show = |status: Option<Value>, problem: Option<String>| match status::with_problem(
        value,
        status,
        problem.as_deref(),
        rules.now,
    ) {
        None => Step::Nothing,
        Some(status) => {
            let before = shown(value);
            let new = has.iter().filter(|one| !before.contains(&one.address)).copied().collect();
            Step::Show { status, new, problem }
        }
    };
    // The shown addresses that only Tortie gives.
    let of_pools = || -> Vec<IpAddr> {
        let is_of_pool = |it: &IpAddr| rules.pools.iter().any(|(_, pool)| pool.spec.cidr.contains(it));
        shown(value).into_iter().filter(is_of_pool).collect()
    };
    let wanted = match wanted {
        // Without a pool for them, Services are somebody else's business.
        Ok(Wanted::OneOf(_) | Wanted::These(_)) | Err(_) if rules.pools.is_empty() => {
            return if has.is_empty() { show(None, None) } else { Step::Nothing };
        }
        Ok(Wanted::Nothing) if has.is_empty() && service.is_load_balancer() => return show(None, None),
        // Nobody else gives such a Service addresses.
        Ok(Wanted::Nothing) if has.is_empty() => return show(status::without(value, &of_pools()), None),
        Ok(wanted) => wanted,
        Err(problem) => return show(None, Some(problem)),
    };
    let Plan { release, assign } = wanted.plan(has, &shown(value), rules.pools);
    if !release.is_empty() {
        let gone: Vec<IpAddr> = release.iter().map(|one| one.address).collect();
        return match status::without(value, &gone) {
            Some(status) => Step::Hide(status),
            None => Step::Release(release),
        };
    }
    let problem = match tried {
        _ if assign.is_empty() => None,
        None if !rules.knows_namespace => return Step::Nothing,
        None | Some(Ok(())) => return Step::Assign(assign),
        Some(Err(problem)) => Some(problem.to_owned()),
    };
    let problem = problem.or_else(|| service.unused_address(has));
    let addresses: Vec<IpAddr> = has.iter().map(|one| one.address).collect();
    if addresses.is_empty() {
        // What somebody else shows stays.
        return show(status::without(value, &of_pools()), problem);
    }
    show(status::with(value, &addresses), problem)
}
