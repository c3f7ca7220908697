#!/usr/bin/perl
# scripts/bench-nbd.pl GODWIT [--rounds N] [--pairs N] [--seconds N] [--only REGEX] [--paired REGEX] [--dir DIR]
#
# `godwit volume serve` beside nbdkit's file plugin and qemu-nbd, by fio's own NBD engine over unix sockets: files of the same
# size on the same disk, one run after the other in turn, so that whatever else the machine does hits all of them alike.
# Ratios are medians of each round's own. Then tracking on against off, in pairs.
#
# What else the machine does is kept out as far as may be: fio and all servers have a higher priority, where the user may give it.
# In the pairs, fio and the server share one processor: whether the scheduler puts them on one or on two is worth a factor of two
# at depth 1, comes by chance, and would hide what is looked for; and each pair is made of several short runs in turn. Two files of
# the same contents are not the same: how the kernel laid their pages together in its cache is chance, and worth more than what is
# looked for. So each server has each file for half of the runs; what the files make of it is a column of its own.
use strict;
use warnings;
use File::Temp qw(tempdir);
use JSON::PP;
use POSIX qw(:sys_wait_h);
use Time::HiRes qw(sleep);

my $godwit = shift // die "usage: $0 GODWIT [--rounds N] [--pairs N] [--seconds N] [--only REGEX] [--paired REGEX] [--dir DIR]\n";
my %o = (rounds => 7, pairs => 20, seconds => 2, only => '.', paired => '.', dir => '/var/tmp', mib => 1024);
while (defined(my $key = shift)) {
    $key =~ s/^--// && exists $o{$key} or die "$0: no option $key\n";
    $o{$key} = shift // die "$0: --$key takes a value\n";
}
my $load = sub { open my $in, '<', '/proc/loadavg' or return ''; (split ' ', <$in>)[0] };
my $favoured = POSIX::nice(-20) ? 'a higher priority' : 'the usual priority';
my $dir = tempdir("$o{dir}/godwit-bench.XXXXXX", CLEANUP => 1);
my %servers = (
    godwit     => sub { ($godwit, 'volume', 'serve', $_[0], '--socket', $_[1]) },
    'no-track' => sub { ($godwit, 'volume', 'serve', $_[0], '--socket', $_[1], '--no-track') },
    nbdkit     => sub { ('nbdkit', '-f', '-U', $_[1], 'file', $_[0]) },
    'qemu-nbd' => sub { ('qemu-nbd', '-t', '-e', '8', '-f', 'raw', '--cache=writeback', '-k', $_[1], $_[0]) },
);
# Runs of each side that a pair has of one arrangement of files.
my $slices = 2;
my %pid;
END { my $code = $?; kill 'TERM', $_ for values %pid; waitpid $_, 0 for values %pid; $? = $code }
$SIG{INT} = $SIG{TERM} = sub { exit 130 };

# Contents that are everywhere and nowhere zero.
sub fill {
    my ($path) = @_;
    open my $out, '>:raw', $path or die "$path: $!";
    my $piece = pack 'L*', map { int rand 2**32 } 1 .. 2**18;
    print $out $piece or die "$path: $!" for 1 .. $o{mib};
    close $out or die "$path: $!";
}

# Starts a server of a file, which has the name of a server: its own, but for what pairs exchange.
my %image;
sub start {
    my ($name, $of) = @_;
    my $socket = "$dir/$name.sock";
    $image{$name} = "$dir/$of.img";
    unlink $socket;
    my $child = fork // die "fork: $!";
    if (!$child) {
        open STDOUT, '>', '/dev/null';
        exec $servers{$name}->($image{$name}, $socket) or die "$name: $!";
    }
    $pid{$name} = $child;
    for (1 .. 1000) {
        last if -S $socket;
        waitpid($child, WNOHANG) == 0 or do { delete $pid{$name}; die "$name ended before it listened\n" };
        sleep 0.02;
    }
}

for my $name (sort keys %servers) {
    fill("$dir/$name.img");
    start($name, $name);
}
system 'sync';

# Seconds of CPU that a server has taken.
sub cpu {
    open my $in, '<', "/proc/$pid{$_[0]}/stat" or die "$_[0] is gone\n";
    my @fields = split ' ', (<$in> =~ s/^.*\) //r);
    return ($fields[11] + $fields[12]) / POSIX::sysconf(POSIX::_SC_CLK_TCK);
}

# One run of fio: operations a second, and the server's microseconds of CPU for each.
sub run {
    my ($name, $w, $time, @before) = @_;
    $time //= "$o{seconds}s";
    my ($image, $socket) = ($image{$name}, "$dir/$name.sock");
    if ($w->{cold}) {
        # What is dirty would stay.
        system('sync', $image) == 0 or die;
        system('dd', 'status=none', "of=$image", 'oflag=nocache', 'conv=notrunc', 'count=0') == 0 or die;
    }
    my @how = $w->{rw} =~ /rand/ || !$w->{cold} ? ("--runtime=$time", '--time_based', '--norandommap') : ();
    my $before = cpu($name);
    open my $fio, '-|', @before, 'fio', '--name=bench', '--ioengine=nbd', "--uri=nbd+unix:///?socket=$socket", "--rw=$w->{rw}",
        "--bs=$w->{bs}", "--iodepth=$w->{depth}", "--size=$o{mib}m", '--randrepeat=0', '--output-format=json', @how
        or die "fio: $!";
    my $text = do { local $/; <$fio> };
    close $fio or die "fio failed on $name\n";
    my $job = decode_json($text =~ s/^.*?(?=^\{)//msr)->{jobs}[0];
    my ($ios, $iops) = map { $job->{read}{$_} + $job->{write}{$_} } qw(total_ios iops);
    my $used = cpu($name) - $before;
    system 'sync', $image if $w->{rw} =~ /write/;
    return { iops => $iops, cpu => $used * 1e6 / $ios };
}

sub median {
    my @sorted = sort { $a <=> $b } @_;
    return ($sorted[$#sorted / 2] + $sorted[@sorted / 2]) / 2;
}

my @workloads;
for my $cold (0, 1) {
    for my $rw (qw(randread randwrite)) {
        push @workloads, { rw => $rw, bs => '4k', depth => $_, cold => $cold } for 1, 32;
    }
    for my $rw (qw(read write)) {
        push @workloads, { rw => $rw, bs => $_, depth => 4, cold => $cold } for '128k', '1m';
    }
}
$_->{name} = sprintf '%s %-9s %4s x%d', $_->{cold} ? 'cold' : 'warm', @$_{qw(rw bs depth)} for @workloads;
my @wanted = grep { $_->{name} =~ /$o{only}/ } @workloads;

# Sets files up: page cache, and the marks of regions that are written. Before each row, since what was left alone for minutes may
# have left the page cache.
sub set_up {
    for my $name (@_) {
        run($name, { rw => $_, bs => '1m', depth => 4, cold => 0 }, '1s') for qw(write read);
    }
}

$| = 1;
printf "%s, load %s; fio and the servers have $favoured\n", (POSIX::uname)[2], $load->();
print "operations a second, medians of $o{rounds} rounds; CPU: the server's, in microseconds for an operation\n";
printf "%-24s %9s %9s %9s   %8s %8s   %9s %7s %8s\n", '', qw(godwit nbdkit qemu-nbd /nbdkit /qemu-nbd CPU nbdkit qemu-nbd);
for my $w (@wanted) {
    my @names = qw(godwit nbdkit qemu-nbd);
    my (%iops, %cpu);
    set_up(@names);
    for my $round (1 .. $o{rounds}) {
        push @names, shift @names;
        for my $name (@names) {
            my $run = run($name, $w);
            push @{ $iops{$name} }, $run->{iops};
            push @{ $cpu{$name} }, $run->{cpu};
        }
    }
    my %ratio;
    for my $peer (qw(nbdkit qemu-nbd)) {
        $ratio{$peer} = median(map { $iops{godwit}[$_] / $iops{$peer}[$_] } 0 .. $o{rounds} - 1);
    }
    printf "%-24s %9.0f %9.0f %9.0f   %8.2f %8.2f   %9.1f %7.1f %8.1f\n", $w->{name},
        (map { median(@{ $iops{$_} }) } qw(godwit nbdkit qemu-nbd)), @ratio{qw(nbdkit qemu-nbd)},
        (map { median(@{ $cpu{$_} }) } qw(godwit nbdkit qemu-nbd));
}
printf "load %s\n", $load->();
exit 0 if $o{pairs} < 2;

my ($cpu) = `taskset -cp $$` =~ /(\d+)$/ or die "taskset names no processor\n";
my @pinned = ('taskset', '-c', $cpu);
my @sides = qw(godwit no-track);

# Serves both sides' files anew, each by its own server or by the other.
sub arrange {
    my @files = @_;
    for (@sides) {
        my $pid = delete $pid{$_} // next;
        kill 'TERM', $pid;
        waitpid $pid, 0;
    }
    start($sides[$_], $files[$_]) for 0, 1;
    qx(taskset -apc $cpu $_) for map { $pid{$_} } @sides;
    set_up(@sides);
}

# What a pair has of one arrangement: the logarithm of the ratio of times.
sub compare {
    my ($w, $pair, $cpu) = @_;
    my %iops;
    for my $slice (1 .. $slices) {
        for my $name (($pair + $slice) % 2 ? @sides : reverse @sides) {
            my $run = run($name, $w, '500ms', @pinned);
            $iops{$name} += $run->{iops};
            push @{ $cpu->{$name} }, $run->{cpu};
        }
    }
    return log($iops{'no-track'} / $iops{godwit});
}

printf "\ntracking on: time for an operation, as a ratio to tracking off; $o{pairs} pairs of %d runs each, half of them with the files exchanged\n",
    2 * $slices;
printf "%-24s %8s %8s %8s   %8s %8s   %8s\n", '', 'ratio', 'from', 'to (95 %)', 'CPU', 'no-track', 'files';
for my $w (grep { !$_->{cold} && $_->{name} =~ /$o{paired}/ } @wanted) {
    my (@own, @other, %cpu);
    arrange(@sides);
    push @own, compare($w, $_, \%cpu) for 1 .. $o{pairs};
    arrange(reverse @sides);
    push @other, compare($w, $_, \%cpu) for 1 .. $o{pairs};
    my @logs = map { ($own[$_] + $other[$_]) / 2 } 0 .. $#own;
    my ($n, $sum, $squares, $files) = (scalar @logs, 0, 0, 0);
    $sum += $_ for @logs;
    $files += ($own[$_] - $other[$_]) / 2 for 0 .. $#own;
    my $mean = $sum / $n;
    $squares += ($_ - $mean)**2 for @logs;
    # Student's t for 19 degrees of freedom; near enough for a few pairs more or less.
    my $half = 2.093 * sqrt($squares / ($n - 1) / $n);
    printf "%-24s %8.3f %8.3f %8.3f   %8.1f %8.1f   %8.3f\n", $w->{name}, exp $mean, exp($mean - $half), exp($mean + $half),
        (map { median(@{ $cpu{$_} }) } @sides), exp($files / $n);
}
printf "load %s\n", $load->();
