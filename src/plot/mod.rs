//! Plots: series over axes and horizontal bars, as SVG, and with the feature `png` the same picture as PNG.
//!
//! `plotters` draws the SVG. The legend is to the right of the axes, so that it never covers data.

mod plan;
#[cfg(feature = "png")]
mod png;
mod routing;
mod stragglers;
mod sweep;
mod text;

use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use plotters::coord::Shift;
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::checkpoint::OutputFile;

pub use plan::{plot_latency, plot_plan};
pub use routing::plot_expert_load;
pub use stragglers::plot_stragglers;
pub use sweep::{plot_grid, plot_isolated, plot_own_time};
use text::FAMILY;
pub use text::failed;

/// Size of the SVG, pixels.
const SIZE: (u32, u32) = (960, 560);
/// Width of the legend, pixels.
const LEGEND: u32 = 236;
/// Height of the title and the line below it, pixels.
const HEADING: u32 = 58;

/// The formats of [`save`].
const FORMATS: &[&str] = if cfg!(feature = "png") { &["svg", "png"] } else { &["svg"] };

/// Colours that the colour-blind can distinguish (Okabe and Ito 2008).
pub const COLORS: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(120, 120, 120),
    RGBColor(190, 175, 0),
];

/// The drawing area.
pub type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<Extent, Extent>>;

/// The scale of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// Linear, starting at 0 if that is near.
    Linear,
    /// Logarithmic, without values of 0 or below.
    Log,
    /// Logarithmic with labels at powers of two: 1, 2, 4.
    Powers,
    /// Logarithmic with labels in bytes: 16 B, 64 B, 1 KiB.
    Bytes,
}

/// One axis.
#[derive(Clone, Debug)]
pub struct Axis {
    /// The label, with the unit.
    pub label: String,
    /// The scale.
    pub scale: Scale,
}

impl Axis {
    /// An axis with this label.
    pub fn new(label: &str, scale: Scale) -> Axis {
        Axis { label: label.to_string(), scale }
    }
}

/// The style of a series.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// A line with a dot at each point.
    Dotted,
    /// A line.
    Line,
    /// A dashed line, for a baseline.
    Dashed,
}

/// A named series of points.
#[derive(Clone, Debug)]
pub struct Series {
    /// Name in the legend.
    pub name: String,
    /// Points in the order of x.
    pub points: Vec<(f64, f64)>,
    /// The style.
    pub style: Style,
    /// Index in [`COLORS`]. Further series repeat the colours with rings instead of dots.
    pub color: usize,
}

/// A line across the plot at one value, with a name in the legend.
#[derive(Clone, Debug)]
pub struct Mark {
    /// Name in the legend.
    pub name: String,
    /// The value.
    pub at: f64,
    /// Whether `at` is an x and the line vertical, instead of a y and horizontal.
    pub upright: bool,
    /// Index in [`COLORS`].
    pub color: usize,
}

/// Series over two axes.
#[derive(Clone, Debug)]
pub struct Plot {
    /// The title.
    pub title: String,
    /// The line below the title.
    pub subtitle: String,
    /// The horizontal axis.
    pub x: Axis,
    /// The vertical axis.
    pub y: Axis,
    /// The series.
    pub series: Vec<Series>,
    /// Lines across the plot.
    pub marks: Vec<Mark>,
}

/// One horizontal bar.
#[derive(Clone, Debug)]
pub struct Bar {
    /// The label.
    pub name: String,
    /// The length, at least 0.
    pub value: f64,
    /// Text at the end of the bar.
    pub text: String,
}

/// Horizontal bars, the first on top.
#[derive(Clone, Debug)]
pub struct Bars {
    /// The title.
    pub title: String,
    /// The line below the title.
    pub subtitle: String,
    /// The label of the lengths, with the unit.
    pub label: String,
    /// The bars.
    pub bars: Vec<Bar>,
}

/// An SVG with a white background and the drawing of `paint`.
///
/// # Errors
/// If the drawing library fails.
pub fn draw(size: (u32, u32), paint: impl FnOnce(&Area) -> Result<()>) -> Result<String> {
    let mut svg = String::new();
    let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
    area.fill(&WHITE).map_err(failed)?;
    paint(&area)?;
    area.present().map_err(failed)?;
    drop(area);
    Ok(svg)
}

/// Draws text at a point of an area.
///
/// # Errors
/// If the drawing library fails.
pub fn write(area: &Area, text: &str, at: (i32, i32), size: i32, anchor: Pos) -> Result<()> {
    let style = (FAMILY, size).into_font().color(&BLACK).pos(anchor);
    area.draw(&Text::new(text.to_string(), at, style)).map_err(failed)
}

/// Checks that this build can write the format of the path, before anything is measured.
///
/// # Errors
/// A path that ends in `.png` in a build without the feature `png`.
pub fn check_format(path: &Path) -> Result<()> {
    check_format_for(cfg!(feature = "png"), path)
}

fn check_format_for(has_png: bool, path: &Path) -> Result<()> {
    ensure!(
        has_png || !is_png(path),
        "{}: this build writes only SVG; PNG needs the cargo feature `png`",
        path.display()
    );
    Ok(())
}

/// Whether a file of this name is a PNG; any other is an SVG.
fn is_png(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("png"))
}

/// The bytes of a picture in the format of the path.
///
/// # Errors
/// If the drawing library fails, and as [`check_format`].
pub fn encode(svg: &str, path: &Path) -> Result<Vec<u8>> {
    check_format(path)?;
    #[cfg(feature = "png")]
    if is_png(path) {
        return png::encode(svg);
    }
    Ok(svg.as_bytes().to_vec())
}

/// Creates the folder of the plots before anything is measured.
///
/// # Errors
/// A folder that cannot be created, or a path that is not a folder.
pub fn create_folder(folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))
}

/// Writes a plot as `<stem>.svg`, and with the feature `png` as `<stem>.png` too; returns the paths.
///
/// # Errors
/// A file that cannot be written.
pub fn save(folder: &Path, stem: &str, svg: &str) -> Result<Vec<PathBuf>> {
    let put = |suffix: &&str| {
        let path = folder.join(format!("{stem}.{suffix}"));
        OutputFile::replace(&path, &encode(svg, &path)?)?;
        Ok(path)
    };
    FORMATS.iter().map(put).collect()
}

/// The range of an axis in scaled values, and its ticks.
#[derive(Clone)]
struct Extent {
    scale: Scale,
    from: f64,
    to: f64,
    ticks: Vec<f64>,
}

impl Scale {
    /// The scaled value, if the scale has one.
    fn place(self, value: f64) -> Option<f64> {
        let placed = match self {
            Scale::Linear => value,
            Scale::Log => value.log10(),
            Scale::Powers | Scale::Bytes => value.log2(),
        };
        placed.is_finite().then_some(placed)
    }
}

impl Extent {
    /// The range of all values with a margin.
    fn of(scale: Scale, values: impl Iterator<Item = f64>) -> Extent {
        let (low, high) = values
            .filter_map(|value| scale.place(value))
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)));
        let (mut from, mut to) = if low <= high { (low, high) } else { (0.0, 1.0) };
        match scale {
            Scale::Linear => {
                // If 0 is near, the axis starts there.
                if from > 0.0 && from < 0.5 * to {
                    from = 0.0;
                }
                if to <= from {
                    (from, to) = (from - 0.5 * from.abs().max(1.0), to + 0.5 * to.abs().max(1.0));
                }
                let step = round_step((to - from) / 7.0);
                let room = if from == 0.0 { 0.0 } else { 0.02 * (to - from) };
                (from, to) = (from - room, to + 0.04 * (to - from));
                let first = (from / step).ceil() as i64;
                let ticks = (first..).map(|i| i as f64 * step).take_while(|&tick| tick <= to).collect();
                Extent { scale, from, to, ticks }
            }
            Scale::Log => {
                (from, to) = (from - 0.06, to + 0.06);
                let decades = to - from;
                let within: &[f64] = if decades > 4.0 {
                    &[1.0]
                } else if decades > 0.7 {
                    &[1.0, 2.0, 5.0]
                } else {
                    &[1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
                };
                let all = (from.floor() as i32..=to.ceil() as i32)
                    .flat_map(|exponent| within.iter().map(move |x| x.log10() + f64::from(exponent)));
                Extent { scale, from, to, ticks: all.filter(|tick| (from..=to).contains(tick)).collect() }
            }
            Scale::Powers | Scale::Bytes => {
                let (first, last) = (from.floor() as i32, to.ceil() as i32);
                let step = [1, 2, 4, 8].into_iter().find(|step| (last - first) / step <= 12).unwrap_or(8);
                let ticks = (first..=last).filter(|e| (e - first) % step == 0).map(f64::from).collect();
                Extent { scale, from: from - 0.4, to: to + 0.4, ticks }
            }
        }
    }

    fn format(&self, placed: f64) -> String {
        match self.scale {
            Scale::Linear => short(placed),
            Scale::Log => short(10f64.powf(placed)),
            Scale::Powers => short(placed.exp2()),
            Scale::Bytes => bytes(placed.exp2().round() as u64),
        }
    }
}

/// A range of scaled values as plotters needs it.
impl Ranged for Extent {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        limit.0 + (f64::from(limit.1 - limit.0) * (value - self.from) / (self.to - self.from)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        if hint.weight().allow_light_points() { Vec::new() } else { self.ticks.clone() }
    }

    fn range(&self) -> Range<f64> {
        self.from..self.to
    }
}

/// The smallest 1, 2 or 5 times a power of ten that is at least this.
fn round_step(least: f64) -> f64 {
    let power = 10f64.powf(least.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|digit| digit * power);
    steps.into_iter().find(|&step| step >= least * (1.0 - 1e-9)).unwrap_or(steps[3])
}

/// A number without trailing zeros.
fn short(value: f64) -> String {
    let rounded = format!("{value:.6}");
    let text = rounded.trim_end_matches('0').trim_end_matches('.');
    if text.is_empty() || text == "-0" { "0".to_string() } else { text.to_string() }
}

/// The label of a number of bytes: "16 B", "4 KiB", "1 MiB".
pub fn bytes(n: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB"];
    let unit = (0..units.len()).rev().find(|&u| n >= 1 << (10 * u) && n.is_multiple_of(1 << (10 * u))).unwrap_or(0);
    format!("{} {}", n >> (10 * unit), units[unit])
}

fn heading(area: &Area, title: &str, subtitle: &str) -> Result<()> {
    write(area, title, (16, 12), 19, Pos::new(HPos::Left, VPos::Top))?;
    write(area, subtitle, (16, 37), 13, Pos::new(HPos::Left, VPos::Top))
}

impl Plot {
    /// The plot as SVG.
    ///
    /// # Errors
    /// No point to draw, or a failure of the drawing library.
    pub fn svg(&self) -> Result<String> {
        ensure!(self.series.iter().any(|s| !s.points.is_empty()), "{}: there is nothing to plot", self.title);
        draw(SIZE, |area| self.paint(area))
    }

    fn paint(&self, area: &Area) -> Result<()> {
        heading(area, &self.title, &self.subtitle)?;
        let (_, below) = area.split_vertically(HEADING);
        let has_legend = self.series.len() + self.marks.len() > 1;
        let (plot, legend) = below.split_horizontally(if has_legend { SIZE.0 - LEGEND } else { SIZE.0 - 20 });
        let values = |pick: fn(&(f64, f64)) -> f64, upright: bool| {
            let marks = self.marks.iter().filter(move |mark| mark.upright == upright).map(|mark| mark.at);
            self.series.iter().flat_map(|s| &s.points).map(pick).chain(marks)
        };
        let x = Extent::of(self.x.scale, values(|at| at.0, true));
        let y = Extent::of(self.y.scale, values(|at| at.1, false));
        let mut chart = ChartBuilder::on(&plot)
            .margin(12)
            .margin_left(16)
            .x_label_area_size(46)
            .y_label_area_size(72)
            .build_cartesian_2d(x.clone(), y.clone())
            .map_err(failed)?;
        chart
            .configure_mesh()
            .x_label_formatter(&|&placed| x.format(placed))
            .y_label_formatter(&|&placed| y.format(placed))
            .label_style((FAMILY, 13))
            .axis_desc_style((FAMILY, 15))
            .x_desc(self.x.label.as_str())
            .y_desc(self.y.label.as_str())
            .bold_line_style(BLACK.mix(0.12))
            .light_line_style(TRANSPARENT)
            .draw()
            .map_err(failed)?;
        for series in &self.series {
            let placed = |&(a, b): &(f64, f64)| Some((x.scale.place(a)?, y.scale.place(b)?));
            paint_series(&mut chart, series, series.points.iter().filter_map(placed).collect())?;
        }
        for mark in &self.marks {
            let Some(at) = (if mark.upright { x.scale } else { y.scale }).place(mark.at) else { continue };
            let ends = if mark.upright { [(at, y.from), (at, y.to)] } else { [(x.from, at), (x.to, at)] };
            let style = COLORS[mark.color % COLORS.len()].stroke_width(2);
            chart.draw_series(DashedLineSeries::new(ends, 7, 4, style)).map_err(failed)?;
        }
        if has_legend { self.legend(&legend) } else { Ok(()) }
    }

    fn legend(&self, area: &Area) -> Result<()> {
        let series = self.series.iter().map(|s| (&s.name, s.style, s.color));
        let marks = self.marks.iter().map(|m| (&m.name, Style::Dashed, m.color));
        for (row, (name, style, number)) in series.chain(marks).enumerate() {
            let y = 24 + 22 * row as i32;
            let color = COLORS[number % COLORS.len()];
            let strokes: &[(i32, i32)] = if style == Style::Dashed { &[(0, 8), (12, 20)] } else { &[(0, 20)] };
            for &(from, to) in strokes {
                area.draw(&PathElement::new([(from, y), (to, y)], color.stroke_width(2))).map_err(failed)?;
            }
            if style == Style::Dotted {
                area.draw(&Circle::new((10, y), 4, dot(number))).map_err(failed)?;
            }
            write(area, name, (28, y), 13, Pos::new(HPos::Left, VPos::Center))?;
        }
        Ok(())
    }
}

fn paint_series(chart: &mut Chart, series: &Series, points: Vec<(f64, f64)>) -> Result<()> {
    let color = COLORS[series.color % COLORS.len()];
    let style = color.stroke_width(if series.points.len() > 400 { 1 } else { 2 });
    if series.style == Style::Dashed {
        chart.draw_series(DashedLineSeries::new(points, 7, 4, style)).map_err(failed)?;
        return Ok(());
    }
    // SVG readers warn about a line with one point.
    if points.len() > 1 {
        chart.draw_series(LineSeries::new(points.iter().copied(), style)).map_err(failed)?;
    }
    if series.style == Style::Dotted {
        chart.draw_series(points.into_iter().map(|at| Circle::new(at, 4, dot(series.color)))).map_err(failed)?;
    }
    Ok(())
}

/// The fill of a series' dots.
fn dot(number: usize) -> ShapeStyle {
    let color = COLORS[number % COLORS.len()];
    match (number / COLORS.len()).is_multiple_of(2) {
        true => color.filled(),
        false => color.stroke_width(2),
    }
}

impl Bars {
    /// The bars as SVG.
    ///
    /// # Errors
    /// No bars, or a failure of the drawing library.
    pub fn svg(&self) -> Result<String> {
        ensure!(!self.bars.is_empty(), "{}: there is nothing to plot", self.title);
        let height = HEADING + 46 * self.bars.len() as u32 + 52;
        draw((SIZE.0, height), |area| self.paint(area))
    }

    fn paint(&self, area: &Area) -> Result<()> {
        const LEFT: i32 = 190;
        const RIGHT: i32 = 160;
        heading(area, &self.title, &self.subtitle)?;
        let longest = self.bars.iter().map(|bar| bar.value).fold(0.0, f64::max);
        let width = f64::from(SIZE.0 as i32 - LEFT - RIGHT);
        let mut y = HEADING as i32 + 8;
        for (place, bar) in self.bars.iter().enumerate() {
            let length = if longest > 0.0 { (width * bar.value / longest) as i32 } else { 0 };
            let color = COLORS[place % COLORS.len()];
            let corners = [(LEFT, y), (LEFT + length.max(1), y + 34)];
            area.draw(&Rectangle::new(corners, color.filled())).map_err(failed)?;
            write(area, &bar.name, (LEFT - 12, y + 17), 15, Pos::new(HPos::Right, VPos::Center))?;
            write(area, &bar.text, (LEFT + length + 10, y + 17), 15, Pos::new(HPos::Left, VPos::Center))?;
            y += 46;
        }
        area.draw(&PathElement::new([(LEFT, HEADING as i32), (LEFT, y)], BLACK.stroke_width(1))).map_err(failed)?;
        write(area, &self.label, (LEFT, y + 14), 14, Pos::new(HPos::Left, VPos::Top))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Plot {
        let series = |name: &str, style, color| Series {
            name: name.into(),
            points: (4..=22).map(|e| (f64::from(1 << e), 0.1 * f64::from(e * e + color as i32))).collect(),
            style,
            color,
        };
        Plot {
            title: "Latency".into(),
            subtitle: "two PEs".into(),
            x: Axis::new("bytes", Scale::Bytes),
            y: Axis::new("latency, us", Scale::Log),
            series: vec![series("put-signal", Style::Dotted, 0), series("memcpy", Style::Dashed, 1)],
            marks: vec![Mark { name: "P95".into(), at: 20.0, upright: false, color: 2 }],
        }
    }

    #[test]
    fn plot_contains_its_labels() {
        let svg = example().svg().unwrap();
        for text in ["Latency", "two PEs", "latency, us", "16 B", "1 MiB", "put-signal", "memcpy", "P95"] {
            assert!(svg.contains(text), "{text}: {svg}");
        }
    }

    #[test]
    fn a_series_of_one_point_has_no_line() {
        let mut plot = example();
        plot.series.iter_mut().for_each(|s| s.points.truncate(1));
        plot.series[1].style = Style::Line;
        let svg = plot.svg().unwrap();
        let lines = svg.split("<polyline").skip(1).filter_map(|line| line.split("points=\"").nth(1)?.split('"').next());
        let ends: Vec<usize> = lines.map(|points| points.split_whitespace().count()).collect();
        assert!(!ends.is_empty() && ends.iter().all(|&points| points > 1), "{ends:?}");
    }

    #[cfg(feature = "png")]
    #[test]
    fn png_contains_text() {
        use resvg::tiny_skia::Pixmap;
        let encoded = encode(&example().svg().unwrap(), Path::new("latency.PNG")).unwrap();
        let picture = Pixmap::decode_png(&encoded).unwrap();
        assert_eq!((picture.width(), picture.height()), (SIZE.0 * png::SCALE, SIZE.1 * png::SCALE));
        // The title, which needs the embedded font.
        let dark = |x, y| picture.pixel(x, y).is_some_and(|p| u16::from(p.red()) + u16::from(p.blue()) < 200);
        let title = (0..400).flat_map(|x| (20..60).map(move |y| (x, y))).filter(|&(x, y)| dark(x, y)).count();
        assert!(title > 200, "{title} dark pixels");
        assert!(encode("no picture", Path::new("latency.png")).is_err());
    }

    #[test]
    fn path_determines_the_format() {
        assert_eq!(encode("<svg/>", Path::new("png.svg")).unwrap(), b"<svg/>");
        let path = Path::new("plots/latency.PNG");
        let said = check_format_for(false, path).unwrap_err().to_string();
        assert!(said.starts_with("plots/latency.PNG: this build writes only SVG") && said.contains("feature `png`"));
        assert!(check_format_for(true, path).is_ok() && check_format_for(false, Path::new("png")).is_ok());
    }

    #[test]
    fn empty_plot_is_an_error() {
        let mut plot = example();
        plot.series.iter_mut().for_each(|s| s.points.clear());
        assert_eq!(plot.svg().unwrap_err().to_string(), "Latency: there is nothing to plot");
        let bars = Bars { title: "Shares".into(), subtitle: String::new(), label: String::new(), bars: vec![] };
        assert!(bars.svg().is_err());
    }

    #[test]
    fn ticks_are_round_values() {
        let labels = |extent: &Extent| extent.ticks.iter().map(|&t| extent.format(t)).collect::<Vec<_>>();
        assert_eq!(labels(&Extent::of(Scale::Linear, [0.3, 6.0].into_iter())), ["0", "1", "2", "3", "4", "5", "6"]);
        assert_eq!(labels(&Extent::of(Scale::Log, [0.05, 30.0].into_iter())).join(" "), "0.05 0.1 0.2 0.5 1 2 5 10 20");
        let sizes = labels(&Extent::of(Scale::Bytes, [16.0, 4194304.0].into_iter()));
        assert_eq!((sizes[0].as_str(), sizes[sizes.len() - 1].as_str()), ("16 B", "4 MiB"));
        let degrees = labels(&Extent::of(Scale::Powers, [1.0, 16.0].into_iter()));
        assert_eq!(degrees, ["1", "2", "4", "8", "16"]);
        // One value, no value, and values without a logarithm.
        for values in [vec![5.0], vec![], vec![0.0, -1.0], vec![f64::NAN]] {
            for scale in [Scale::Linear, Scale::Log, Scale::Powers, Scale::Bytes] {
                let extent = Extent::of(scale, values.iter().copied());
                assert!(extent.from < extent.to && extent.ticks.len() < 20, "{scale:?} {values:?}");
            }
        }
    }

    #[test]
    fn length_of_a_bar_is_its_value() {
        let bar = |name: &str, value: f64| Bar { name: name.into(), value, text: format!("{value}%") };
        let bars = Bars {
            title: "Shares".into(),
            subtitle: String::new(),
            label: "ms".into(),
            bars: vec![bar("router", 40.0), bar("combine", 10.0), bar("none", 0.0)],
        };
        let svg = bars.svg().unwrap();
        let widths: Vec<u32> = svg
            .lines()
            .filter(|line| line.starts_with("<rect") && line.contains("x=\"190\""))
            .map(|line| line.split("width=\"").nth(1).unwrap().split('"').next().unwrap().parse().unwrap())
            .collect();
        assert_eq!(widths.len(), 3, "{svg}");
        assert!(widths[0].abs_diff(4 * widths[1]) <= 4 && widths[2] <= 2, "{widths:?}");
    }
}
