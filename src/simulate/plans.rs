//! The work of each expert-parallel group in a step, planned by the layer's own code: routes, windows and chunks, tiles.

use std::collections::HashMap;
use std::ops::Range;

use anyhow::Result;

use super::rows::rows;
use super::{Machine, RowsPer, Simulated};
use crate::formats::routing::{NO_EXPERT, Record};
use crate::moe::cpu::experts::tiles;
use crate::moe::placement::block;
use crate::moe::synthetic::Synthetic;
use crate::moe::{Groups, Placement};
use crate::sim::routing::{Popularity, Workload};
use crate::sim::step::{Cutting, Group, GroupPlan};

/// Maximum number of independent random choices. Beyond it, PEs share the choices of as many nodes as the largest group has PEs.
const MAX_CHOICES: usize = 1 << 25;

/// The source of the PEs' choices of experts.
pub(super) enum Choices {
    /// A record, from a file or random. PE p has the tokens of node p mod the number of nodes.
    Record(Record),
    /// The choices of a synthetic layer, the same as in `aristos run` with the same flags. PE p has its block of the tokens.
    Synthetic(Box<Synthetic>, usize),
}

impl Choices {
    /// Random choices.
    pub fn drawn(simulated: &Simulated, tokens: usize, popularity: Popularity, seed: u64) -> Result<Choices> {
        let (experts, top_k) = (simulated.config.n_experts, simulated.config.router.top_k);
        let (pes, largest) = (simulated.pes(), (0..simulated.groups.len()).map(|g| simulated.groups.members(g).len()));
        // A node for each PE, or for each PE of the largest group.
        let per_node = tokens.div_ceil(pes).max(1);
        let nodes = match per_node.saturating_mul(top_k).saturating_mul(pes) > MAX_CHOICES {
            true => largest.max().unwrap_or(1),
            false => pes,
        };
        let tokens = if nodes == pes { tokens } else { per_node * nodes };
        let workload = Workload { experts, tokens, top_k, nodes, popularity, layers: 1, steps: 1, seed };
        Ok(Choices::Record(workload.routing()?.records.remove(0)))
    }

    /// The node whose tokens a PE has.
    fn node(&self, pe: usize) -> usize {
        match self {
            Choices::Record(record) => pe % record.tokens_per_node.len(),
            Choices::Synthetic(..) => pe,
        }
    }

    /// The choices of each node's tokens.
    fn of_nodes(&self, top_k: usize, pes: usize) -> Vec<Vec<i32>> {
        let id = |&expert: &u32| if expert == NO_EXPERT { -1 } else { expert as i32 };
        match self {
            Choices::Record(record) => {
                record.choices_by_node(top_k).map(|(_, choices)| choices.iter().map(id).collect()).collect()
            }
            Choices::Synthetic(synthetic, tokens) => {
                let drawn = |token: usize| synthetic.draw_experts(token).into_iter().map(|expert| expert as i32);
                (0..pes).map(|pe| block(*tokens, pes, pe).flat_map(drawn).collect()).collect()
            }
        }
    }
}

/// The simulated groups, and their plans, which groups may share.
pub(super) struct Plans {
    pub groups: Vec<Group>,
    pub plans: Vec<GroupPlan>,
}

impl Plans {
    /// Tokens of each expert, over all groups.
    pub fn tokens_per_expert(&self, experts: usize) -> Vec<u64> {
        self.rows_per_expert(&self.groups, experts)
    }

    fn rows_per_expert(&self, groups: &[Group], experts: usize) -> Vec<u64> {
        let mut tokens = vec![0; experts];
        for group in groups {
            for (experts, rows) in group.experts.iter().zip(self.plans[group.plan].expert_rows()) {
                experts.iter().zip(rows).for_each(|(&expert, &rows)| tokens[expert] += u64::from(rows));
            }
        }
        tokens
    }
}

/// The host of each PE, numbered from 0.
pub(super) fn host_of(simulated: &Simulated) -> Vec<usize> {
    let mut of = vec![0; simulated.pes()];
    for (host, pes) in simulated.cluster.hosts().iter().enumerate() {
        pes.iter().for_each(|&pe| of[pe as usize] = host);
    }
    of
}

/// Plans groups with these placements.
pub(super) fn plans(simulated: &Simulated, groups: &Groups, choices: &Choices) -> Result<Plans> {
    let (config, options) = (&simulated.config, &simulated.options);
    let of_nodes = choices.of_nodes(config.router.top_k, simulated.pes());
    let mut known: HashMap<(Vec<usize>, Vec<usize>, &Placement), usize> = HashMap::new();
    let host_of = host_of(simulated);
    let mut all = Plans { groups: Vec::new(), plans: Vec::new() };
    let chunk_rows = simulated.layout()?.chunk_rows;
    for g in 0..groups.len() {
        let (members, placement) = (groups.members(g), groups.placement(g));
        let nodes: Vec<usize> = members.iter().map(|&pe| choices.node(pe)).collect();
        // The index of the first member on each member's host. Matters only if rows are sent per host.
        let hosts: Vec<usize> = match simulated.rows_per {
            RowsPer::Host => {
                let first = |pe: &usize| members.iter().position(|other| host_of[*other] == host_of[*pe]).unwrap_or(0);
                members.iter().map(first).collect()
            }
            _ => vec![0; members.len()],
        };
        let next = all.plans.len();
        let plan = *known.entry((nodes.clone(), hosts.clone(), placement)).or_insert(next);
        if plan == next {
            let of_pe = |(pe, &node): (usize, &usize)| rows(simulated, placement, pe, &of_nodes[node], &hosts);
            let rows = nodes.iter().enumerate().map(of_pe).collect::<Result<Vec<_>>>()?;
            let tokens: Vec<usize> = nodes.iter().map(|&node| of_nodes[node].len() / config.router.top_k).collect();
            let experts: Vec<usize> = (0..members.len()).map(|pe| placement.experts(pe).len()).collect();
            let of_device = simulated.calibration.as_ref().and_then(Machine::tile_rows);
            // A device's tiles are full except for the last one.
            let whole = of_device.map(|rows| options.tile_rows().next_multiple_of(rows));
            let cut = |run: Range<usize>| match whole {
                None => tiles(run, options.tile_rows()).collect(),
                Some(rows) => run.clone().step_by(rows).map(|start| start..run.end.min(start + rows)).collect(),
            };
            let cutting = Cutting { chunk_rows, early_rows: options.tile_rows().div_ceil(2), tiles: &cut };
            all.plans.push(GroupPlan::new(&rows, &tokens, &experts, &cutting));
        }
        let experts = (0..members.len()).map(|pe| placement.experts(pe).to_vec()).collect();
        all.groups.push(Group { members: members.to_vec(), experts, plan });
    }
    Ok(all)
}

/// The groups with a greedy placement: the busiest expert first, on the PE with the fewest rows, without more experts on a PE than before.
pub(super) fn balanced(groups: &Groups, plans: &Plans) -> Result<Groups> {
    let mut placed = Vec::with_capacity(groups.len());
    for (g, group) in plans.groups.iter().enumerate() {
        let old = groups.placement(g);
        let rows = plans.rows_per_expert(std::slice::from_ref(group), old.n_experts());
        let mut order: Vec<usize> = (0..rows.len()).collect();
        order.sort_by_key(|&expert| std::cmp::Reverse(rows[expert]));
        let (mut load, mut held) = (vec![0u64; old.n_pes()], vec![0usize; old.n_pes()]);
        let mut owners = vec![0u32; rows.len()];
        for expert in order {
            let has_room = |pe: &usize| held[*pe] < old.max_local();
            let Some(pe) = (0..old.n_pes()).filter(has_room).min_by_key(|&pe| (load[pe], pe)) else { continue };
            owners[expert] = pe as u32;
            load[pe] += rows[expert];
            held[pe] += 1;
        }
        placed.push((group.members.clone(), Placement::from_owners(owners, old.n_pes())));
    }
    let pes = placed.iter().map(|(members, _)| members.len()).sum();
    Groups::new(pes, placed).map_err(|wrong| anyhow::anyhow!("groups: {wrong}"))
}
