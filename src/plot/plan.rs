//! Plots, as SVG: a plan on its cluster, and iteration latency against the number of experts.

use std::collections::HashMap;

use anyhow::Result;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::{Area, COLORS, draw, failed, write};
use crate::cluster::{Cluster, Device, Links};
use crate::plan::{Objective, Plan, Workload, objective_ms};

const WIDTH: u32 = 960;
const HEIGHT: u32 = 600;
/// Minimum width and height of a cell with text, pixels.
const LABELLED: (i32, i32) = (38, 24);
/// Maximum curves of the latency plot.
const CURVES: usize = 6;

/// A row per host and a cell per device, in the colour of its group, with the device's id and number of experts. The darker bar at the bottom is the
/// device's share of its group's makespan.
///
/// # Errors
/// If the drawing library fails.
pub fn plot_plan(cluster: &Cluster, workload: &Workload, plan: &Plan) -> Result<String> {
    draw((WIDTH, HEIGHT), |area| plan_on(area, cluster, workload, plan))
}

fn plan_on(area: &Area, cluster: &Cluster, workload: &Workload, plan: &Plan) -> Result<()> {
    const TOP: i32 = 64;
    const LEFT: i32 = 110;
    const EDGE: i32 = 12;
    let costs = workload.costs();
    let time =
        |experts: &[u32], device: &Device| experts.iter().map(|&e| costs[e as usize]).sum::<f64>() / device.flop_per_ms;
    let mut of_device: HashMap<u64, (usize, &Vec<u32>)> = HashMap::new();
    for (g, group) in plan.groups.iter().enumerate() {
        of_device.extend(group.experts.iter().map(|(id, experts)| (*id, (g, experts))));
    }
    // The time of each group's slowest device.
    let mut longest = vec![0.0f64; plan.groups.len()];
    for device in &cluster.devices {
        if let Some(&(g, experts)) = of_device.get(&device.id) {
            longest[g] = longest[g].max(time(experts, device));
        }
    }
    let title = format!(
        "{} devices, {} experts: {}, {:.2} ms per iteration ({})",
        cluster.devices.len(),
        workload.n_experts(),
        crate::report::text::count(plan.groups.len() as u64, "group"),
        plan.objective_ms,
        plan.algorithm
    );
    write(area, &title, (EDGE, EDGE), 20, Pos::new(HPos::Left, VPos::Top))?;
    let key = "a block per host, a colour per group; in a cell, device: number of experts; bar: time over its group's makespan";
    write(area, key, (EDGE, EDGE + 26), 13, Pos::new(HPos::Left, VPos::Top))?;

    // Many hosts: several hosts in a row.
    let hosts = cluster.hosts();
    let widest = hosts.iter().map(Vec::len).max().unwrap_or(1).max(1);
    let per_row =
        (1..=hosts.len()).find(|per_row| hosts.len().div_ceil(*per_row) * 24 <= widest * per_row * 16).unwrap_or(1);
    let rows = hosts.len().div_ceil(per_row);
    let columns = per_row * widest + per_row - 1;
    let cell =
        (f64::from(WIDTH as i32 - LEFT - EDGE) / columns as f64, f64::from(HEIGHT as i32 - TOP - EDGE) / rows as f64);
    for (place, host) in hosts.iter().enumerate() {
        let (row, first) = (place / per_row, place % per_row * (widest + 1));
        let y = (TOP + (row as f64 * cell.1) as i32, TOP + ((row + 1) as f64 * cell.1 * 0.999) as i32);
        let name: String = cluster.devices[host[0] as usize].host.chars().take(12).collect();
        // Several hosts in a row have their names in the gap to the left, if it is wide enough.
        let gap = if per_row == 1 { LEFT } else { cell.0 as i32 };
        if cell.1 >= 12.0 && (first == 0 || gap >= 10 + 8 * name.chars().count() as i32) {
            let x = LEFT + (first as f64 * cell.0) as i32;
            let name = if first == 0 && per_row > 1 && gap < 10 + 8 * name.chars().count() as i32 {
                name + " ..."
            } else {
                name
            };
            write(area, &name, (x - 8, (y.0 + y.1) / 2), 13, Pos::new(HPos::Right, VPos::Center))?;
        }
        for (seat, &i) in host.iter().enumerate() {
            let device = &cluster.devices[i as usize];
            let x = LEFT + ((first + seat) as f64 * cell.0) as i32;
            let x = (x, LEFT + ((first + seat + 1) as f64 * cell.0) as i32);
            let inset = i32::from(x.1 - x.0 > 4 && y.1 - y.0 > 4);
            let (near, far) = ((x.0 + inset, y.0 + inset), (x.1 - inset, y.1 - inset));
            let Some(&(g, experts)) = of_device.get(&device.id) else {
                area.draw(&Rectangle::new([near, far], BLACK.mix(0.08).filled())).map_err(failed)?;
                continue;
            };
            let color = COLORS[g % COLORS.len()];
            area.draw(&Rectangle::new([near, far], color.mix(0.45).filled())).map_err(failed)?;
            let time = time(experts, device);
            let busy = if longest[g] > 0.0 { (time / longest[g]).min(1.0) } else { 0.0 };
            let bar = (near.0 + (f64::from(far.0 - near.0) * busy) as i32, far.1);
            let height = ((far.1 - near.1) / 8).max(1);
            area.draw(&Rectangle::new([(near.0, far.1 - height), bar], color.filled())).map_err(failed)?;
            if far.0 - near.0 >= LABELLED.0 && far.1 - near.1 >= LABELLED.1 {
                let text = format!("{}: {}", device.id, experts.len());
                let middle = ((near.0 + far.0) / 2, (near.1 + far.1) / 2);
                write(area, &text, middle, 13, Pos::new(HPos::Center, VPos::Center))?;
            }
        }
    }
    Ok(())
}

/// A point of the latency plot.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Point {
    experts: usize,
    /// `None` if the experts do not fit into memory.
    latency_ms: Option<f64>,
}

/// Iteration latency (the objective) over the number of experts, for several sizes of consecutive groups. Crosses at the top are out of memory. Every
/// expert has the mean cost of the workload's experts.
///
/// # Errors
/// If the drawing library fails.
pub fn plot_latency(cluster: &Cluster, workload: &Workload, objective: Objective) -> Result<String> {
    let curves = latency(cluster, workload, objective);
    draw((WIDTH, HEIGHT), |area| latency_on(area, &curves))
}

/// The points of each group size.
fn latency(cluster: &Cluster, workload: &Workload, objective: Objective) -> Vec<(usize, Vec<Point>)> {
    let n = cluster.devices.len();
    let all: Vec<u32> = (0..n as u32).collect();
    // From a quarter to sixteen times the number of experts, or until every size is out of memory.
    let most = 16 * workload.n_experts();
    let mut numbers = vec![(workload.n_experts() / 4).max(1)];
    while let Some(last) = numbers.last()
        && *last < most
    {
        numbers.push(2 * last);
    }
    let mean = workload.costs().iter().sum::<f64>() / workload.n_experts() as f64;
    let curve = |size: usize| {
        let groups: Vec<Vec<u32>> = all.chunks(size).map(<[u32]>::to_vec).collect();
        let point = |&experts: &usize| {
            let mut workload = workload.clone();
            (workload.expert_flop, workload.expert_load) = (vec![mean; experts], None);
            Point { experts, latency_ms: objective_ms(cluster, &workload, &groups, objective) }
        };
        (size, numbers.iter().map(point).collect())
    };
    let mut curves: Vec<(usize, Vec<Point>)> = sizes(cluster).into_iter().map(curve).collect();
    // Plus the first number that fits nowhere.
    let last = |points: &Vec<Point>| points.iter().rposition(|point| point.latency_ms.is_some()).map_or(1, |at| at + 2);
    let shown = curves.iter().map(|(_, points)| last(points)).max().unwrap_or(0);
    curves.iter_mut().for_each(|(_, points)| points.truncate(shown));
    curves
}

/// The group sizes with a curve: hosts, blocks of tiers, all devices, and powers of two that divide the number of devices, up to a maximum.
fn sizes(cluster: &Cluster) -> Vec<usize> {
    let n = cluster.devices.len();
    let mut sizes = vec![n, cluster.hosts()[0].len()];
    if let Links::Tiers(tiers) = &cluster.links {
        sizes.extend(tiers.tiers().iter().map(|tier| tier.size.min(n)));
    }
    sizes.extend((0..n.ilog2()).rev().map(|l| 1 << l));
    let mut distinct = Vec::new();
    for size in sizes {
        if n.is_multiple_of(size) && !distinct.contains(&size) && distinct.len() < CURVES {
            distinct.push(size);
        }
    }
    distinct.sort_unstable();
    distinct
}

/// Round numbers from `low` to `high`, at least a few.
fn ticks(low: f64, high: f64) -> Vec<f64> {
    let steps: &[f64] = if high / low > 100.0 { &[1.0, 3.0] } else { &[1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0] };
    let decades = low.log10().floor() as i32..=high.log10().ceil() as i32;
    let all = decades.flat_map(|decade| steps.iter().map(move |step| step * 10f64.powi(decade)));
    all.filter(|tick| (low..=high).contains(tick)).collect()
}

fn latency_on(area: &Area, curves: &[(usize, Vec<Point>)]) -> Result<()> {
    let latencies = || curves.iter().flat_map(|(_, points)| points).filter_map(|point| point.latency_ms);
    let (low, high) = latencies().fold((f64::INFINITY, 0.0f64), |(low, high), x| (low.min(x), high.max(x)));
    let (low, high) = if high > 0.0 && low > 0.0 { (low / 1.2, high * 1.5) } else { (0.5, 2.0) };
    let numbers: Vec<usize> =
        curves.first().map_or_else(Vec::new, |(_, points)| points.iter().map(|p| p.experts).collect());
    let mut chart = ChartBuilder::on(area)
        .caption("Iteration latency by size of the expert-parallel groups (EP)", ("sans-serif", 20))
        .margin(14)
        .x_label_area_size(48)
        .y_label_area_size(80)
        .build_cartesian_2d(
            -0.5..numbers.len() as f64 - 0.5,
            (low..high).log_scale().with_key_points(ticks(low, high / 1.3)),
        )
        .map_err(failed)?;
    let label = |x: &f64| match numbers.get(x.round() as usize) {
        Some(experts) if (x - x.round()).abs() < 0.01 && *x > -0.01 => experts.to_string(),
        _ => String::new(),
    };
    chart
        .configure_mesh()
        .x_labels(numbers.len().max(2))
        .x_label_formatter(&label)
        .y_label_formatter(&|y| format!("{y}"))
        .x_desc("experts")
        .y_desc("ms per iteration (lower is better)")
        .label_style(("sans-serif", 14))
        .bold_line_style(BLACK.mix(0.12))
        .light_line_style(TRANSPARENT)
        .draw()
        .map_err(failed)?;
    // A band at the top for points out of memory.
    let (band, top) = (high / 1.22, high / 1.1);
    let edges = (-0.5, numbers.len() as f64 - 0.5);
    chart
        .draw_series([Rectangle::new([(edges.0, band), (edges.1, high)], BLACK.mix(0.06).filled())])
        .map_err(failed)?;
    let style = ("sans-serif", 14).into_font().color(&BLACK).pos(Pos::new(HPos::Left, VPos::Center));
    chart.draw_series([Text::new("out of memory", (-0.47, top), style)]).map_err(failed)?;
    for (place, (size, points)) in curves.iter().enumerate() {
        let color = COLORS[place % COLORS.len()];
        let line: Vec<(f64, f64)> =
            points.iter().enumerate().filter_map(|(x, p)| p.latency_ms.map(|y| (x as f64, y))).collect();
        chart
            .draw_series(LineSeries::new(line.iter().copied(), color.stroke_width(2)))
            .map_err(failed)?
            .label(format!("EP = {size}"))
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2)));
        chart.draw_series(line.iter().map(|&at| Circle::new(at, 4, color.filled()))).map_err(failed)?;
        // Next to each other, so that all curves' crosses are visible.
        let aside = 0.11 * (place as f64 - (curves.len() as f64 - 1.0) / 2.0);
        let out = points.iter().enumerate().filter(|(_, p)| p.latency_ms.is_none());
        chart
            .draw_series(out.map(|(x, _)| Cross::new((x as f64 + aside, top), 5, color.stroke_width(2))))
            .map_err(failed)?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .label_font(("sans-serif", 14))
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()
        .map_err(failed)
}
